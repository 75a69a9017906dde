"""Rows: the laws of the plan, for any sample lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.data.packing import PackingPlan, plan_packing, shuffled_by_shards

ROW_TOKENS, ROW_IMAGES = 100, 4
SAMPLES = st.lists(st.tuples(st.integers(1, ROW_TOKENS), st.integers(0, ROW_IMAGES)), max_size=200)


def plan(samples: list[tuple[int, int]], **options: Any) -> PackingPlan:
    tokens, images = np.array(samples, np.int32).reshape(-1, 2).T
    settings = {
        "sequence_length": ROW_TOKENS,
        "max_images_per_sequence": ROW_IMAGES,
        "seed": 0,
        "epoch": 0,
        "window": 16,
    } | options
    return plan_packing(tokens, images, **settings)


@given(SAMPLES, st.booleans(), st.integers(1, 64))
def test_each_sample_is_in_exactly_one_row(samples: list[tuple[int, int]], pack: bool, window: int) -> None:
    made = plan(samples, pack=pack, window=window)
    assert sorted(made.members.tolist()) == list(range(len(samples)))
    assert made.offsets[0] == 0 and made.offsets[-1] == len(samples)
    assert (np.diff(made.offsets) > 0).all()


@given(SAMPLES)
def test_no_row_exceeds_a_budget(samples: list[tuple[int, int]]) -> None:
    made = plan(samples)
    for number in range(len(made)):
        row = [samples[member] for member in made.members_of(number)]
        assert sum(tokens for tokens, _ in row) <= ROW_TOKENS
        assert sum(images for _, images in row) <= ROW_IMAGES


def best_fit(order: list[int], samples: list[tuple[int, int]], max_images: int) -> list[list[int]]:
    """The definition: each sample into the sequence with room that it leaves the fewest tokens free in."""
    free: list[list[int]] = []
    rows: list[list[int]] = []
    for number in order:
        tokens, images = samples[number]
        have_room = [row for row, left in enumerate(free) if left[0] >= tokens and left[1] >= images and all(left)]
        row = min(have_room, key=lambda row: (free[row][0], row), default=len(rows))
        if row == len(rows):
            rows.append([])
            free.append([ROW_TOKENS, max_images])
        rows[row].append(number)
        free[row] = [free[row][0] - tokens, free[row][1] - images]
    return rows


@given(SAMPLES, st.sampled_from([ROW_IMAGES, 7, 10**15]), st.integers(0, 3))
def test_a_window_is_packed_by_best_fit(samples: list[tuple[int, int]], max_images: int, epoch: int) -> None:
    """Longest first, or in the epoch's order where that needs fewer sequences and many tokens were left free."""
    made = plan(samples, window=200, max_images_per_sequence=max_images, epoch=epoch)
    order = shuffled_by_shards(len(samples), 0, epoch, None, 1)[0].tolist()
    rows = best_fit(sorted(order, key=lambda number: -samples[number][0]), samples, max_images)
    if sum(tokens for tokens, _ in samples) < 0.97 * ROW_TOKENS * len(rows):
        rows = min(rows, best_fit(order, samples, max_images), key=len)
    assert sorted(made.members_of(number).tolist() for number in range(len(made))) == sorted(rows)


@given(SAMPLES, st.integers(0, 2**40), st.integers(0, 100))
def test_the_plan_is_a_pure_function(samples: list[tuple[int, int]], seed: int, epoch: int) -> None:
    assert plan(samples, seed=seed, epoch=epoch).digest() == plan(samples, seed=seed, epoch=epoch).digest()


def test_seed_and_epoch_each_change_the_order() -> None:
    samples = [(10 + n % 7, 1) for n in range(100)]
    digests = {plan(samples, seed=seed, epoch=epoch).digest() for seed in range(5) for epoch in range(5)}
    assert len(digests) == 25


def test_the_order_never_changes_between_versions() -> None:
    # A run that resumes after an upgrade must read on where it stopped; another order would repeat and skip data.
    samples = [(10 + n % 7, 1) for n in range(12)]
    made = plan(samples, seed=7, epoch=3)
    assert [made.members_of(number).tolist() for number in range(len(made))] == [
        [10, 3, 2, 9],
        [6, 5, 11, 4],
        [1, 8, 0, 7],
    ]


SHARDS = st.lists(st.integers(0, 11), min_size=1, max_size=150)  # of each sample


def in_shards(shards: list[int], shuffle_shards: int, **options: Any) -> PackingPlan:
    samples = [(7 + 13 * number % 40, number % 3) for number in range(len(shards))]
    return plan(samples, shards=np.array(shards), shuffle_shards=shuffle_shards, **options)


@given(SHARDS, st.integers(1, 14), st.booleans())
def test_groups_of_shards_keep_the_laws(shards: list[int], shuffle_shards: int, pack: bool) -> None:
    made = in_shards(shards, shuffle_shards, pack=pack)
    assert sorted(made.members.tolist()) == list(range(len(shards)))
    assert (np.diff(made.offsets) > 0).all() and made.offsets[-1] == len(shards)
    assert made.digest() == in_shards(shards, shuffle_shards, pack=pack).digest()


@given(SHARDS, st.integers(1, 14), st.booleans())
def test_few_shards_are_needed_at_a_time(shards: list[int], shuffle_shards: int, pack: bool) -> None:
    """A shard is needed from the row where it is met first to that where it is met last."""
    made = in_shards(shards, shuffle_shards, pack=pack)
    met = [set(np.array(shards)[made.members_of(number)].tolist()) for number in range(len(made))]
    needed = [set().union(*met[: row + 1]) & set().union(*met[row:]) for row in range(len(met))]
    assert max(len(each) for each in needed) <= shuffle_shards


@given(SHARDS, st.integers(0, 5))
def test_a_data_set_of_one_group_is_shuffled_as_a_whole(shards: list[int], epoch: int) -> None:
    samples = [(7 + 13 * number % 40, number % 3) for number in range(len(shards))]
    assert in_shards(shards, max(shards) + 1, epoch=epoch).digest() == plan(samples, epoch=epoch).digest()


def test_each_epoch_groups_other_shards() -> None:
    shards = [number // 10 for number in range(120)]
    first = [in_shards(shards, 3, epoch=epoch).members[:30] for epoch in range(8)]
    assert len({frozenset((members // 10).tolist()) for members in first}) > 4


def test_the_order_of_groups_never_changes_between_versions() -> None:
    made = in_shards([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], 2, seed=7, epoch=3)
    rows = [made.members_of(number).tolist() for number in range(len(made))]
    assert rows == [[0], [3, 2, 1], [8, 7], [6, 9], [5, 4]]


def test_without_packing_each_sample_has_its_own_row() -> None:
    made = plan([(10, 1)] * 50, pack=False)
    assert np.diff(made.offsets).tolist() == [1] * 50
    assert made.members.tolist() != list(range(50))


def test_packing_fills_rows_of_mixed_lengths() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 2000)
    made = plan([(int(length), 0) for length in lengths], window=1024)
    assert made.fill == pytest.approx(lengths.sum() / (len(made) * ROW_TOKENS))
    assert made.fill > 0.98


def test_few_distinct_lengths_are_packed_well() -> None:
    """Of two lengths, four long ones leave a gap that no short one fits into: all rows of longest first are such."""
    lengths = np.random.default_rng(0).choice([40, 55], 2000, p=[1 / 3, 2 / 3])
    made = plan([(int(length), 0) for length in lengths], window=1024, sequence_length=256)
    assert sorted(made.members) == list(range(2000))
    assert made.fill > 0.91


def test_the_image_budget_alone_can_close_a_row() -> None:
    made = plan([(1, 2)] * 10)
    assert np.diff(made.offsets).tolist() == [2] * 5


def test_a_sample_larger_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="more than one sequence"):
        plan([(ROW_TOKENS + 1, 0)])
    with pytest.raises(ValueError, match="more than one sequence"):
        plan([(1, ROW_IMAGES + 1)])


def test_no_samples_give_no_rows() -> None:
    made = plan([])
    assert len(made) == 0 and made.fill == 0.0
