"""Groups in packed sequences: the laws of the plan, for any groups and lengths."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.data.packing import PackingPlan, plan_packing
from vlmpipe.trainer.data.prefixes.groups import PrefixGroups
from vlmpipe.trainer.data.prefixes.items import Items

ROW_TOKENS, ROW_IMAGES = 100, 4
# (tokens of the prefix, tokens of each branch, images) of each group; a prefix of 0 tokens is a sample alone.
GROUPS = st.lists(
    st.tuples(st.integers(0, 60), st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, ROW_IMAGES)),
    max_size=20,
)
Groups = list[tuple[int, list[int], int]]


class Case:
    """Samples of groups, scattered over the sample numbers."""

    def __init__(self, groups: Groups, max_branches: int = 0) -> None:
        members = [
            (number if prefix else -1, prefix, prefix + branch, images if prefix else 0)
            for number, (prefix, branches, images) in enumerate(groups)
            for branch in branches
        ]
        scattered = [members[place] for place in np.random.default_rng(0).permutation(len(members))]
        group, prefix_tokens, tokens, images = np.array(scattered, np.int32).reshape(-1, 4).T
        alone = np.flatnonzero(group < 0)
        group[alone] = 1000 + np.arange(len(alone))
        self.tokens, self.images = tokens, images
        self.prefixes = PrefixGroups(group, prefix_tokens, max_branches)

    def plan(self, **options: Any) -> PackingPlan:
        fixed = {"sequence_length": ROW_TOKENS, "max_images_per_sequence": ROW_IMAGES, "seed": 0, "epoch": 0}
        return plan_packing(self.tokens, self.images, **(fixed | {"window": 32, "prefixes": self.prefixes} | options))

    def rows(self, plan: PackingPlan) -> list[list[list[int]]]:
        """The neighbours of one group in each sequence."""
        of = self.prefixes.group
        rows = [plan.members_of(number).tolist() for number in range(len(plan))]
        return [[list(run) for _, run in groupby(row, key=lambda sample: int(of[sample]))] for row in rows]


@given(GROUPS, st.integers(0, 5), st.integers(1, 40))
def test_each_sample_is_in_one_row_within_its_budgets(groups: Groups, most: int, window: int) -> None:
    case = Case(groups, most)
    plan = case.plan(window=window)
    assert sorted(plan.members.tolist()) == list(range(len(case.tokens)))
    stored = case.prefixes.stored_tokens(plan.members, plan.offsets, case.tokens)
    for row, (start, stop) in zip(case.rows(plan), pairwise(plan.offsets.tolist()), strict=True):
        used = sum(
            int(case.prefixes.prefix_tokens[run[0]])
            + sum(int(case.tokens[one] - case.prefixes.prefix_tokens[one]) for one in run)
            for run in row
        )
        assert used == int(stored[start:stop].sum()) <= ROW_TOKENS
        assert sum(int(case.images[run[0]]) for run in row) <= ROW_IMAGES
        assert len({int(case.prefixes.group[run[0]]) for run in row}) == len(row), "a prefix is in a sequence once"
        assert not most or max(map(len, row)) <= most
    if len(plan):
        assert plan.fill == pytest.approx(float(stored.sum()) / (len(plan) * ROW_TOKENS))


@given(GROUPS, st.integers(0, 5), st.integers(0, 2**40), st.integers(0, 100))
def test_the_plan_is_a_pure_function(groups: Groups, most: int, seed: int, epoch: int) -> None:
    first, again = (Case(groups, most).plan(seed=seed, epoch=epoch) for _ in range(2))
    assert first.digest() == again.digest()


@given(GROUPS, st.integers(1, 12), st.integers(1, 5))
def test_groups_stay_inside_of_groups_of_shards(groups: Groups, shards: int, shuffle_shards: int) -> None:
    """So an epoch still needs each shard during one period only."""
    case = Case(groups)
    of_shard = np.arange(len(case.tokens)) % shards
    plain = case.plan(shards=of_shard, shuffle_shards=shuffle_shards, prefixes=None)
    shared = case.plan(shards=of_shard, shuffle_shards=shuffle_shards)
    runs = [[shard for shard, _ in groupby(of_shard[plan.members].tolist())] for plan in (plain, shared)]
    if shuffle_shards == 1:
        assert runs[0] == runs[1] and max(Counter(runs[1]).values(), default=1) == 1
    assert sorted(shared.members.tolist()) == list(range(len(case.tokens)))


def test_a_group_that_exceeds_a_row_is_cut_into_equal_pieces() -> None:
    case = Case([(40, [10] * 13, 1)])
    sizes = sorted(len(run) for row in case.rows(case.plan()) for run in row)
    assert sizes == [4, 4, 5], "6 fit behind the prefix"


def test_a_cap_spreads_a_group_over_rows() -> None:
    case = Case([(10, [4] * 8, 1) for _ in range(6)], max_branches=2)
    rows = case.rows(case.plan(window=48))
    assert all(len(run) == 2 for row in rows for run in row)
    assert 6 <= len(rows) <= 7, "24 pieces of one image each, four to a row"


def test_a_sample_without_a_prefix_that_is_drawn_twice_brings_its_images_twice() -> None:
    prefixes = PrefixGroups(np.array([0, 1, 1], np.int32), np.array([0, 5, 5], np.int32))
    drawn, tokens = np.array([0, 0, 1, 2, 1]), np.array([9, 8, 7], np.int32)
    items = Items.of(drawn, np.array([0, 5]), tokens, prefixes, 100)
    assert items.offsets.tolist() == [0, 1, 2, 5] and items.tokens.tolist() == [9, 9, 8 + 2 + 3]
    assert prefixes.is_first(drawn, np.array([0, 5])).tolist() == [True, True, True, False, False]
    assert prefixes.stored_tokens(drawn, np.array([0, 5]), tokens).tolist() == [9, 9, 8, 2, 3]


def test_without_prefixes_the_plan_is_what_it_was() -> None:
    case = Case([(0, [10 + n % 7], 1) for n in range(100)])
    plain, shared = case.plan(prefixes=None), case.plan()
    assert plain.digest() == shared.digest()


def test_shared_tokens_are_those_of_the_sample_before() -> None:
    prefixes = PrefixGroups(np.array([5, 5, 7, 5, 8], np.int32), np.array([4, 4, 3, 4, 0], np.int32))
    assert prefixes.shared_tokens([0, 1, 2, 3, 4]) == [0, 4, 0, 0, 0]
    assert prefixes.shared_tokens([2, 3, 1, 0]) == [0, 0, 4, 4]
    assert prefixes.shared_tokens([]) == []
