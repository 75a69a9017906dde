"""Items: neighbours of a group that are packed as one, in the fewest pieces of nearly equal size that fit."""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.data.packing import plan_packing
from vlmpipe.trainer.data.prefixes.groups import PrefixGroups
from vlmpipe.trainer.data.prefixes.items import Items

MOST_TOKENS = 100
# Tokens of the prefix, and of each branch, of runs of neighbours; a prefix of 0 tokens is shared by nobody.
RUNS = st.lists(
    st.tuples(st.integers(0, 60), st.lists(st.integers(1, 40), min_size=1, max_size=14)), min_size=1, max_size=12
)


def pieces_of(branches: list[int], room: int, most: int) -> list[int]:
    """The definition, for a prefix that is shared: lengths of the fewest pieces that fit, as equal as can be."""
    for count in range(1, len(branches) + 1):
        cuts = [len(branches) * number // count for number in range(count + 1)]
        fit = all(sum(branches[start:stop]) <= room for start, stop in pairwise(cuts))
        if fit and count >= -(-len(branches) // (most or len(branches))):
            return [stop - start for start, stop in pairwise(cuts)]
    raise AssertionError("single samples fit")


@given(RUNS, st.integers(0, 5), st.integers(1, 30))
def test_items_are_the_fewest_pieces_that_fit(runs: list[tuple[int, list[int]]], most: int, window: int) -> None:
    samples = [(number, prefix, branch) for number, (prefix, branches) in enumerate(runs) for branch in branches]
    group, prefix_tokens, branches = np.array(samples, np.int32).T
    edges = np.array([*range(0, len(samples), window), len(samples)])
    prefixes = PrefixGroups(group, prefix_tokens, most)
    order = np.arange(len(samples))
    items = Items.of(order, edges, prefix_tokens + branches, prefixes, MOST_TOKENS)
    lengths, first = list[int](), [0]
    for start, stop in pairwise(edges.tolist()):
        for _, run in groupby(samples[start:stop], key=lambda sample: sample[0]):
            neighbours = list(run)
            prefix, own = neighbours[0][1], [branch for _, _, branch in neighbours]
            lengths += pieces_of(own, MOST_TOKENS - prefix, most) if prefix else [1] * len(own)
        first.append(len(lengths))
    assert np.diff(items.offsets).tolist() == lengths and items.edges.tolist() == first
    taken = [prefix_tokens[start] + branches[start:stop].sum() for start, stop in pairwise(items.offsets)]
    assert items.tokens.tolist() == taken
    assert items.samples(np.arange(len(lengths)))[0].tolist() == order.tolist()


def test_the_order_of_groups_never_changes_between_versions() -> None:
    """Computed by a version that divided and packed every window by itself: groups that repeat in windows, and not."""
    numbers = np.arange(40_000)
    group, branches = (numbers // 7 * 31 % 5_000).astype(np.int32), 20 + numbers * 7919 % 280
    prefix_tokens = np.where(group % 6, 200 + group % 150, 0).astype(np.int32)
    group = np.where(prefix_tokens, group, 5_000 + numbers).astype(np.int32)
    made = plan_packing(
        prefix_tokens + branches,
        1 + group % 2,
        sequence_length=1024,
        max_images_per_sequence=4,
        seed=5,
        epoch=1,
        window=64,
        shards=numbers // 1000,
        shuffle_shards=8,
        prefixes=PrefixGroups(group, prefix_tokens, max_branches=5),
    )
    assert made.digest() == "791ec0a69b641e19d13e7baf67ee04f847efc5d3203fd22cbca1d94d008885ca"
