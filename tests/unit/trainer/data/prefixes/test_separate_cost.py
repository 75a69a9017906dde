"""What separate samples cost, by keys of prefixes and by images alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vlmpipe.trainer.data.prefixes.separate_cost import separate_cost
from vlmpipe.trainer.data.shards.image_index import HASHES

TOKENS = np.array([100, 100, 120, 50, 30], np.int32)  # two questions about an image, one about two, one, and a text


class Split(SimpleNamespace):
    """A `SplitIndex` of these samples, of which the first two share a prefix."""

    def __init__(self, *, has_prefixes: bool) -> None:
        hashes = np.array([b"a" * 32, b"a" * 32, b"a" * 32, b"b" * 32, b"c" * 32], HASHES)
        super().__init__(
            tokens=TOKENS,
            image_count=np.array([1, 1, 2, 1, 0], np.int32),
            image_tokens=np.array([60, 60, 90, 40, 0], np.int32),
            images=lambda: hashes,
            has_prefixes=has_prefixes,
            prefix_tokens=np.array([64, 64, 94, 0, 0], np.int32),
            prefix_keys=np.array([[1], [1], [2], [0], [0]], np.uint8),
            pair_prefix_tokens=np.array([70, 70, 100, 45, 10], np.int32),
        )

    def __len__(self) -> int:
        return len(self.tokens)


@pytest.mark.parametrize(("has_prefixes", "saved"), [(True, 64), (False, 60)])
def test_tokens_of_what_is_the_same_count_once(has_prefixes: bool, saved: int) -> None:
    split: Any = Split(has_prefixes=has_prefixes)
    assert separate_cost(split) == pytest.approx(400 / (400 - saved))


@pytest.mark.parametrize(("has_prefixes", "saved"), [(True, 64 + 295), (False, 60 + 250)])
def test_prompts_of_pairs_count_once_too(has_prefixes: bool, saved: int) -> None:
    """Where prepared data does not tell, their images do."""
    split: Any = Split(has_prefixes=has_prefixes)
    split.tokens = 2 * TOKENS
    assert separate_cost(split, in_pairs=True) == pytest.approx(800 / (800 - saved))
