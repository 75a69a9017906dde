"""Packs samples into sequences: a pure function of sample lengths, seed and epoch.

Best fit, longest first, within windows of a shuffled order (best-fit decreasing; Johnson, 1974), or in shuffled order
where that needs fewer sequences. Every sequence has a token and an image budget, which bounds memory. Shards come in
shuffled order, and samples and sequences are shuffled within groups of shards, so that an epoch needs each shard during
one period only. The shuffle uses its own mixing function (SplitMix64; Steele, Lea and Flood, 2014), because a library's
generator may change with its version, and a resumed run would silently read other data.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.config.sources.data_fields import SHUFFLE_SHARDS
from vlmpipe.trainer.data.prefixes.items import Items
from vlmpipe.trainer.data.window_packing.windows import pack_windows, stable_order

if TYPE_CHECKING:
    from vlmpipe.trainer.data.prefixes.groups import PrefixGroups

Int64Array = NDArray[np.int64]
Integers = NDArray[np.integer]
WINDOW = 1024  # samples packed together


@dataclass(frozen=True)
class PackingPlan:
    """The packed sequences of one epoch: sequence i holds the samples `members[offsets[i]:offsets[i + 1]]`."""

    offsets: Int64Array  # (sequences + 1,)
    members: Int64Array  # (samples,)
    fill: float  # share of tokens that are not padding

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def members_of(self, number: int) -> Int64Array:
        """Sample numbers of one sequence, in order."""
        return self.members[self.offsets[number] : self.offsets[number + 1]]

    def digest(self) -> str:
        """SHA-256 of the plan, hexadecimal: equal digests mean equal data order."""
        little_endian = (self.offsets.astype("<i8"), self.members.astype("<i8"))
        return hashlib.sha256(b"".join(array.tobytes() for array in little_endian)).hexdigest()


def plan_packing(
    tokens: Integers,
    images: Integers,
    *,
    sequence_length: int,
    max_images_per_sequence: int,
    seed: int,
    epoch: int,
    pack: bool = True,
    window: int = WINDOW,
    shards: Integers | None = None,
    shuffle_shards: int = SHUFFLE_SHARDS,
    drawn: Int64Array | None = None,
    prefixes: PrefixGroups | None = None,
) -> PackingPlan:
    """The packed sequences of an epoch; each sample is in exactly one, or as often as it is in `drawn`.

    Raises ValueError when a single sample exceeds the budget: preparation rejects such samples.

    Args:
        tokens: (samples,) length of each sample.
        images: (samples,) number of images of each sample.
        pack: False gives each sample its own sequence.
        window: samples packed together; more fill sequences better and take longer.
        shards: (samples,) number of each sample's shard, from 0; None: all samples are one group.
        drawn: sample numbers in an order that is kept but for the places within a window.
        prefixes: which samples share a prefix, that is in a sequence once; None: none do.
    """
    if len(tokens) and (int(tokens.max()) > sequence_length or int(images.max()) > max_images_per_sequence):
        raise ValueError(
            f"a sample needs more than one sequence's {sequence_length} tokens or {max_images_per_sequence} images"
        )
    if drawn is None:
        order, groups = shuffled_by_shards(len(tokens), seed, epoch, shards, shuffle_shards, prefixes=prefixes)
    else:
        order, groups = drawn, np.arange(len(drawn)) // window
    if pack:
        edges, budget = _windows(groups, window), (sequence_length, max_images_per_sequence)
        if prefixes is None:
            members, sizes = pack_windows(order, edges, tokens, images, budget)
        else:
            members, sizes = _packed_groups(order, edges, tokens, images, budget, prefixes)
    else:
        members, sizes = order, np.ones_like(order)
    # Within a window, sequences come longest sample first; a second shuffle removes that pattern.
    group_of_row = groups[np.cumsum(sizes) - sizes]
    shuffled = _gathered(_shuffled(len(sizes), seed, epoch, "rows"), group_of_row)
    starts = (np.cumsum(sizes) - sizes)[shuffled]
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes[shuffled], out=offsets[1:])
    members = members[np.repeat(starts - offsets[:-1], sizes[shuffled]) + np.arange(len(members))]
    if prefixes is None:
        stored = tokens if drawn is None else tokens[drawn]
    else:
        stored = prefixes.stored_tokens(members, offsets, tokens)
    fill = float(stored.sum()) / (len(sizes) * sequence_length) if len(sizes) else 0.0
    return PackingPlan(offsets, members, fill)


def shuffled_by_shards(
    samples: int,
    seed: int,
    epoch: int,
    shards: Integers | None,
    shuffle_shards: int,
    stream: str = "",
    prefixes: PrefixGroups | None = None,
) -> tuple[Int64Array, Int64Array]:
    """(samples,) sample numbers in an epoch's order, and (samples,) the group of shards of each place, ascending.

    `stream` tells apart orders of the same seed and epoch. Samples that share a prefix stand together inside a group.
    """
    order = _shuffled(samples, seed, epoch, f"{stream}samples")
    groups = np.zeros_like(order) if shards is None else _groups(shards, shuffle_shards, seed, epoch, stream)
    order = _gathered(order, groups)
    sizes = np.bincount(groups)
    in_order = np.repeat(np.arange(len(sizes)), sizes)
    return order if prefixes is None else prefixes.together(order, in_order), in_order


def _groups(shards: Integers, shuffle_shards: int, seed: int, epoch: int, stream: str) -> Int64Array:
    """(samples,) group of each sample: shards in shuffled order, in groups of nearly equal size."""
    num_shards = int(shards.max(initial=-1)) + 1
    num_groups = -(-num_shards // shuffle_shards)
    place = np.argsort(_shuffled(num_shards, seed, epoch, f"{stream}shards"))  # of each shard in the shuffled order
    groups: Int64Array = (place * num_groups // max(1, num_shards))[shards]
    return groups


def _gathered(order: Int64Array, groups: Int64Array) -> Int64Array:
    """The order, stably sorted by group."""
    return order[stable_order(groups[order])]


def _windows(groups: Int64Array, window: int) -> Int64Array:
    """(windows + 1,) where in the gathered order each window begins, within groups, and the last one ends."""
    stop_of_group = np.cumsum(np.bincount(groups)).tolist()
    starts = [start for first, last in pairwise([0, *stop_of_group]) for start in range(first, last, window)]
    return np.array([*starts, len(groups)], np.int64)


def _packed_groups(
    order: Int64Array,
    edges: Int64Array,
    tokens: Integers,
    images: Integers,
    budget: tuple[int, int],
    prefixes: PrefixGroups,
) -> tuple[Int64Array, Int64Array]:
    """Pack windows whose samples share prefixes: groups, or pieces of them, as samples. Returns as `pack_windows`."""
    items = Items.of(order, edges, tokens, prefixes, budget[0])
    first = order[items.offsets[:-1]]
    apart = prefixes.group[first]
    packed, num_items = pack_windows(np.arange(len(first)), items.edges, items.tokens, images[first], budget, apart)
    places, lengths = items.samples(packed)
    sizes = np.add.reduceat(lengths, np.cumsum(num_items) - num_items) if len(lengths) else lengths
    return order[places], sizes


def _shuffled(length: int, seed: int, epoch: int, stream: str) -> Int64Array:
    """A permutation of range(length) that depends only on the arguments."""
    start = hashlib.sha256(f"{stream} {seed} {epoch}".encode()).digest()[:8]
    state = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64(int.from_bytes(start, "little"))
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    # Each step is a bijection and the states differ: no two keys are equal, and any kind of sort gives this order.
    return np.argsort(state ^ (state >> np.uint64(31))).astype(np.int64)
