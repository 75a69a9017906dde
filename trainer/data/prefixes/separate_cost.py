"""The cost of computing samples about the same images separately."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.data.prefixes.sharing import MEASURED, PAIRS_MEASURED

Int32Array = NDArray[np.int32]


class Samples(Protocol):
    """The columns of a split that are read: see `vlmpipe.trainer.data.shards.index.SplitIndex`."""

    tokens: Int32Array
    image_tokens: Int32Array

    def __len__(self) -> int: ...
    def images(self) -> NDArray[np.bytes_]: ...

    @property
    def image_count(self) -> Int32Array: ...
    @property
    def has_prefixes(self) -> bool: ...
    @property
    def prefix_tokens(self) -> Int32Array: ...
    @property
    def prefix_keys(self) -> NDArray[np.uint8]: ...
    @property
    def pair_prefix_tokens(self) -> Int32Array: ...


def separate_cost(split: Samples, *, in_pairs: bool = False) -> float:
    """Tokens of all samples, as a multiple of those with each image, or prefix, once for all samples that have it, and
    for both conversations of a pair."""
    if not len(split):
        return 1.0
    shared, keys = (split.prefix_tokens, split.prefix_keys) if split.has_prefixes else _by_images(split)
    has_some = shared > 0
    _, first, count = np.unique(keys[has_some], axis=0, return_index=True, return_counts=True)
    saved = int((shared[has_some][first].astype(np.int64) * (count - 1)).sum())
    if in_pairs:
        of_pairs = split.pair_prefix_tokens if split.has_prefixes else split.image_tokens
        saved += int(of_pairs.sum(dtype=np.int64))
    tokens = int(split.tokens.sum(dtype=np.int64))
    return tokens / (tokens - saved)


def _by_images(split: Samples) -> tuple[Int32Array, NDArray[np.uint8]]:
    """Image tokens of each sample, and the bytes of its first image's hash and of that number: equal, but for chance,
    for samples with the same images."""
    counts, hashes = split.image_count, split.images()
    first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])[:-1]
    keys = np.zeros((len(split), hashes.itemsize + split.image_tokens.itemsize), np.uint8)
    has_any = counts > 0
    of_first = np.ascontiguousarray(hashes[first[has_any]])
    keys[has_any, : hashes.itemsize] = of_first.view(np.uint8).reshape(-1, hashes.itemsize)
    keys[:, hashes.itemsize :] = split.image_tokens.view(np.uint8).reshape(len(split), -1)
    return np.where(has_any, split.image_tokens, 0), keys


def cost_text(cost: float | None, *, in_pairs: bool = False) -> str:
    """A half-sentence. cost: of `separate_cost`; None where no data is prepared."""
    if cost is None:
        return PAIRS_MEASURED if in_pairs else MEASURED
    if cost < 1.05:
        return "nearly no two samples of the data have the same images"
    return f"the data's samples are {cost:.1f} times as many tokens as with each image once"
