"""Items of packing: neighbours in the order that share a prefix, as many as fit into a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vlmpipe.trainer.data.prefixes.groups import PrefixGroups

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Items:
    """The items of an epoch's order: item i holds the samples `order[offsets[i]:offsets[i + 1]]`."""

    offsets: Int64Array  # (items + 1,)
    edges: Int64Array  # (windows + 1,) first item of each window, and the number of items
    tokens: Int64Array  # (items,) with the shared prefix once

    @classmethod
    def of(
        cls, order: Int64Array, edges: Int64Array, tokens: NDArray[np.integer], prefixes: PrefixGroups, max_tokens: int
    ) -> Items:
        """Neighbours of a group, as many as fit into a sequence and are allowed there, in pieces of nearly equal size.

        Args:
            order: sample numbers.
            edges: (windows + 1,) where in the order each window begins, and the last one ends.
            tokens: (samples,) of whole samples.
        """
        group, lengths = prefixes.group[order], tokens[order].astype(np.int64)
        begins = np.ones(len(order) + 1, np.bool_)
        begins[1:-1] = group[1:] != group[:-1]
        begins[edges] = True
        start = np.flatnonzero(begins)  # of each run of neighbours, and the end
        length = np.diff(start)
        prefix = prefixes.prefix_tokens[order[start[:-1]]].astype(np.int64)
        before = np.concatenate([[0], np.cumsum(lengths)])  # tokens before each place
        branches = before[start[1:]] - before[start[:-1]] - prefix * length
        room = np.maximum(max_tokens - prefix, 1)
        most = prefixes.max_branches
        pieces = np.maximum(-(-branches // room), -(-length // most) if most else 1)
        pieces = np.where(prefix > 0, np.minimum(pieces, length), length)
        unsettled = np.flatnonzero(pieces < length)
        while len(unsettled):
            starts, stops, run = _pieces(start[unsettled], length[unsettled], pieces[unsettled])
            sizes = before[stops] - before[starts] - prefix[unsettled][run] * (stops - starts)
            unsettled = unsettled[np.unique(run[sizes > room[unsettled][run]])]
            pieces[unsettled] += 1
            unsettled = unsettled[pieces[unsettled] < length[unsettled]]
        starts, stops, run = _pieces(start[:-1], length, pieces)
        sizes = before[stops] - before[starts] - prefix[run] * (stops - starts - 1)
        offsets = np.append(starts, len(order))
        return cls(offsets, np.searchsorted(offsets, edges), sizes)

    def samples(self, items: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Places in the order of the items' samples, item by item, and (items,) how many each has."""
        lengths = np.diff(self.offsets)[items]
        ends = np.cumsum(lengths)
        return np.repeat(self.offsets[items] - ends + lengths, lengths) + np.arange(
            ends[-1] if len(ends) else 0
        ), lengths


def _pieces(
    start: Int64Array, length: Int64Array, count: Int64Array
) -> tuple[Int64Array, Int64Array, NDArray[np.intp]]:
    """Start and stop of each piece, and its run: `count` pieces of nearly equal size of each run of neighbours."""
    run = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
    starts, stops = (start[run] + length[run] * place // count[run] for place in (number, number + 1))
    return starts, stops, run
