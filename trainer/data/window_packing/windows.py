"""Windows of an epoch's order, each packed longest first, or as it is ordered where that needs fewer sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.data.window_packing.best_fit import best_fit
from vlmpipe.trainer.data.window_packing.side_by_side import FROM_WINDOWS, best_fit_side_by_side

Int64Array = NDArray[np.int64]
Integers = NDArray[np.integer]
WELL_FILLED = 0.97  # fill of a window from which no other packing is tried
SIDE_BY_SIDE = 256  # windows: with more, the free tokens of their sequences leave the second cache of a core


@dataclass(frozen=True)
class _Block:
    """Some windows, by falling number of their samples. A place where a window has no sample takes nothing."""

    lengths: Int64Array  # (windows,) samples
    tokens: Int64Array  # (windows, places)
    images: Int64Array  # (windows, places)
    apart: Integers | None  # (windows, places)

    def at(self, windows: Int64Array) -> _Block:
        """Some of the windows."""
        apart = None if self.apart is None else self.apart[windows]
        return _Block(self.lengths[windows], self.tokens[windows], self.images[windows], apart)

    def sorted(self, places: Int64Array) -> _Block:
        """Each window's samples in the order of `places`, (windows, places)."""
        tokens, images = (np.take_along_axis(array, places, axis=1) for array in (self.tokens, self.images))
        apart = None if self.apart is None else np.take_along_axis(self.apart, places, axis=1)
        return _Block(self.lengths, tokens, images, apart)

    def sequences(self, budget: tuple[int, int]) -> Int64Array:
        """(windows, places) number of each sample's sequence in its window; where there is no sample, `places`."""
        windows, places = self.tokens.shape
        sequences = np.full((windows, places), places)
        together = self._without_apart() if windows >= FROM_WINDOWS else np.empty(0, np.int64)
        if len(together) >= FROM_WINDOWS:
            some = self.at(together)
            packed = best_fit_side_by_side(some.tokens, some.images, some.lengths, budget)
            sequences[together] = np.where(np.arange(places) < some.lengths[:, None], packed, places)
        else:
            together = together[:0]
        for window in np.setdiff1d(np.arange(windows), together).tolist():
            length = self.lengths[window]
            apart = None if self.apart is None else self.apart[window, :length]
            sequences[window, :length] = best_fit(
                self.tokens[window, :length], self.images[window, :length], budget, apart
            )
        return sequences

    def _without_apart(self) -> Int64Array:
        """Windows any of whose samples may share a sequence."""
        if self.apart is None:
            return np.arange(len(self.lengths))
        # A place without a sample gets a number of its own.
        places = np.arange(self.apart.shape[1])
        numbers = np.sort(np.where(places < self.lengths[:, None], self.apart, -1 - places), axis=1)
        return np.flatnonzero((numbers[:, 1:] != numbers[:, :-1]).all(axis=1))


def pack_windows(
    order: Int64Array,
    edges: Int64Array,
    tokens: Integers,
    images: Integers,
    budget: tuple[int, int],
    apart: Integers | None = None,
) -> tuple[Int64Array, Int64Array]:
    """The samples of all windows, sequence by sequence, and the number of samples of each sequence.

    Longest first, or in the block order where that needs fewer sequences: longest first packs badly where few lengths
    occur and several long samples leave a gap that no short one fits.

    Args:
        order: samples, each window's next to each other.
        edges: (windows + 1,) where in the order each window begins, and the last one ends.
        apart: (samples,) samples of equal numbers never share a sequence; None: all may.
    """
    # Into arrays at once: a million samples as lists of lists would take 200 bytes each.
    members, sizes = np.empty_like(order), [np.empty(0, np.int64)]
    for first in range(0, len(edges) - 1, SIDE_BY_SIDE):
        of_block = edges[first : first + SIDE_BY_SIDE + 1]
        start, stop = of_block[0], of_block[-1]
        in_block = order[start:stop]
        of_samples = tokens[in_block], images[in_block], None if apart is None else apart[in_block]
        places, in_sequences = _packed(of_block - start, *of_samples, budget)
        members[start:stop] = in_block[places]
        sizes.append(in_sequences)
    return members, np.concatenate(sizes)


def _packed(
    edges: Int64Array, tokens: Integers, images: Integers, apart: Integers | None, budget: tuple[int, int]
) -> tuple[Int64Array, Int64Array]:
    """Places of a block's samples, sequence by sequence, and the number of samples of each sequence."""
    by_length = np.argsort(-np.diff(edges), kind="stable")
    lengths = np.diff(edges)[by_length]
    columns = np.arange(lengths[0])
    is_sample = columns < lengths[:, None]
    places = np.where(is_sample, edges[by_length, None] + columns, 0)
    block = _Block(
        lengths,
        np.where(is_sample, tokens[places], 0).astype(np.int64),
        np.where(is_sample, images[places], 0).astype(np.int64),
        None if apart is None else apart[places],
    )
    order = stable_order(np.where(is_sample, budget[0] - block.tokens, budget[0] + 1))
    sequences = block.sorted(order).sequences(budget)
    needed = _num_sequences(sequences)
    loose = np.flatnonzero(block.tokens.sum(axis=1) < WELL_FILLED * needed * budget[0])
    if len(loose):
        unsorted = block.at(loose).sequences(budget)
        is_better = _num_sequences(unsorted) < needed[loose]
        sequences[loose[is_better]], order[loose[is_better]] = unsorted[is_better], columns
    packed = np.empty_like(places)
    packed[by_length] = np.take_along_axis(np.take_along_axis(places, order, 1), stable_order(sequences), 1)
    sizes = np.empty_like(sequences)
    numbers = np.arange(len(sequences))[:, None] * len(columns) + sequences
    sizes[by_length] = np.bincount(numbers[is_sample], minlength=sequences.size).reshape(sequences.shape)
    return packed[columns < np.diff(edges)[:, None]], sizes[sizes > 0]


def _num_sequences(sequences: Int64Array) -> Int64Array:
    """(windows,) sequences that each window needs."""
    counts: Int64Array = np.where(sequences < sequences.shape[1], sequences, -1).max(axis=1) + 1
    return counts


def stable_order(numbers: Integers) -> Int64Array:
    """The places of the numbers along the last axis, from 0 on, in ascending order, equal ones in theirs."""
    is_short = int(numbers.max(initial=0)) < 1 << 16  # NumPy's radix sort is for these
    return np.argsort(numbers.astype(np.uint16) if is_short else numbers, axis=-1, kind="stable")
