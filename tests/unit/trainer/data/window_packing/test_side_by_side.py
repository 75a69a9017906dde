"""Windows that are packed side by side: the sequences are those of best fit in each window by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.data.packing import plan_packing
from vlmpipe.trainer.data.window_packing import windows
from vlmpipe.trainer.data.window_packing.best_fit import best_fit
from vlmpipe.trainer.data.window_packing.side_by_side import FROM_WINDOWS, best_fit_side_by_side

BUDGETS = st.tuples(st.sampled_from([12, 100, 4096, 1 << 20, 1 << 33]), st.sampled_from([1, 4, 7, 10**15]))
SHARES = st.tuples(st.floats(0, 1), st.integers(0, 4))  # of a sample: tokens of the budget, images
WINDOWS = st.lists(st.lists(SHARES, min_size=1, max_size=40), min_size=1, max_size=12)


@given(WINDOWS, BUDGETS, st.integers(0, 3))
def test_each_window_is_packed_as_by_itself(
    shares: list[list[tuple[float, int]]], budget: tuple[int, int], beyond: int
) -> None:
    """Windows of any lengths; samples without tokens or images, with a whole budget of either, and ties.

    beyond: places of a longer window that is packed elsewhere.
    """
    shares.sort(key=len, reverse=True)
    lengths = np.array([len(window) for window in shares])
    tokens = np.zeros((len(shares), lengths[0] + beyond), np.int64)
    images = np.zeros_like(tokens)
    for number, window in enumerate(shares):
        tokens[number, : len(window)] = [round(share * budget[0]) for share, _ in window]
        images[number, : len(window)] = [min(count, budget[1]) for _, count in window]
    rows = best_fit_side_by_side(tokens, images, lengths, budget)
    for number, length in enumerate(lengths):
        alone = best_fit(tokens[number, :length], images[number, :length], budget)
        assert rows[number, :length].tolist() == alone.tolist()


@pytest.mark.parametrize("most_images", [1, 3])
def test_a_plan_of_many_windows_is_the_one_of_windows_one_by_one(
    most_images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several blocks, with short windows at the ends of groups of shards, some of them packed twice."""
    samples, window = 64 * 2 * FROM_WINDOWS, 32
    random = np.random.default_rng(0)
    tokens, images = random.choice([40, 55, 7, 18], samples), random.integers(0, most_images + 1, samples)

    def digest() -> str:
        shards = np.arange(samples) // 75
        options = {"sequence_length": 256, "max_images_per_sequence": 5, "seed": 1, "epoch": 2, "window": window}
        return plan_packing(tokens, images, shards=shards, shuffle_shards=5, **options).digest()

    side_by_side = digest()
    monkeypatch.setattr(windows, "FROM_WINDOWS", samples)
    assert side_by_side == digest()


def test_the_order_of_many_windows_never_changes_between_versions() -> None:
    """Computed by a version that packed every window by itself."""
    numbers = np.arange(60_000)
    tokens, images = 50 + numbers * 7919 % 851, numbers * 31 % 3
    made = plan_packing(
        tokens,
        images,
        sequence_length=2048,
        max_images_per_sequence=6,
        seed=7,
        epoch=3,
        shards=numbers // 1000,
        shuffle_shards=16,
    )
    assert made.digest() == "2ae55b8b29f847f9b73afa82ace57df73df9477a13ec9cf57a01e76a5e0c2f18"
