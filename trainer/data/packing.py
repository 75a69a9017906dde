"""Packs samples into sequences: a pure function of sample lengths, seed and epoch.

Best fit, longest first, within windows of a shuffled order (best-fit decreasing; Johnson, 1974), or in shuffled order
where that needs fewer sequences. Every sequence has a token and an image budget, which bounds memory. Shards come in
shuffled order, and samples and sequences are shuffled within groups of shards, so that an epoch needs each shard during
one period only. The shuffle uses its own mixing function (SplitMix64; Steele, Lea and Flood, 2014), because a library's
generator may change with its version, and a resumed run would silently read other data.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.config.data import SHUFFLE_SHARDS

if TYPE_CHECKING:
    from vlmpipe.trainer.data.prefixes.groups import PrefixGroups

Int64Array = NDArray[np.int64]
Integers = NDArray[np.integer]
WINDOW = 1024  # samples packed together
WELL_FILLED = 0.97  # fill of a window from which no other packing is tried


@dataclass(frozen=True)
class PackingPlan:
    """The packed sequences of one epoch: sequence i holds the samples `members[offsets[i]:offsets[i + 1]]`."""

    offsets: Int64Array  # (sequences + 1,)
    members: Int64Array  # (samples,)
    fill: float  # share of tokens that are not padding

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, number: int) -> Int64Array:
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
        # Into arrays at once: a million samples as lists of lists would take 200 bytes each.
        members, lengths = np.empty_like(order), [np.empty(0, np.int64)]
        for start, stop in _windows(groups, window):
            in_window, budget = order[start:stop], (sequence_length, max_images_per_sequence)
            if prefixes is None:
                members[start:stop], row_lengths = _packed(in_window, tokens, images, budget)
            else:
                members[start:stop], row_lengths = _packed_groups(in_window, tokens, images, budget, prefixes)
            lengths.append(row_lengths)
        sizes = np.concatenate(lengths)
    else:
        members, sizes = order, np.ones_like(order)
    # Within a window, sequences come longest sample first; a second shuffle removes that pattern.
    group_of_row = groups[np.cumsum(sizes) - sizes]
    shuffled = _gathered(_shuffled(len(sizes), seed, epoch, "rows"), group_of_row)
    starts = (np.cumsum(sizes) - sizes)[shuffled]
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes[shuffled], out=offsets[1:])
    members = members[np.repeat(starts - offsets[:-1], sizes[shuffled]) + np.arange(len(members))]
    stored = tokens[order] if prefixes is None else prefixes.stored_tokens(members, offsets, tokens)
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
    if prefixes is not None:
        order = prefixes.together(order, groups[order])
    return order, groups[order]


def _groups(shards: Integers, shuffle_shards: int, seed: int, epoch: int, stream: str) -> Int64Array:
    """(samples,) group of each sample: shards in shuffled order, in groups of nearly equal size."""
    num_shards = int(shards.max(initial=-1)) + 1
    num_groups = -(-num_shards // shuffle_shards)
    place = np.argsort(_shuffled(num_shards, seed, epoch, f"{stream}shards"))  # of each shard in the shuffled order
    groups: Int64Array = (place * num_groups // max(1, num_shards))[shards]
    return groups


def _gathered(order: Int64Array, groups: Int64Array) -> Int64Array:
    """The order, stably sorted by group."""
    return order[_stable_order(groups[order])]


def _windows(groups: Int64Array, window: int) -> Iterator[tuple[int, int]]:
    """Start and stop of each window in the gathered order, within groups."""
    stop_of_group = np.cumsum(np.bincount(groups)).tolist()
    for first, last in pairwise([0, *stop_of_group]):
        for start in range(first, last, window):
            yield start, min(start + window, last)


def _packed(
    samples: Int64Array,
    tokens: Integers,
    images: Integers,
    budget: tuple[int, int],
    apart: Integers | None = None,
) -> tuple[Int64Array, Int64Array]:
    """The samples of one window, sequence by sequence, and the number of samples of each sequence.

    Longest first, or in the given order where that needs fewer sequences: longest first packs badly where few lengths
    occur and several long samples leave a gap that no short one fits.
    apart: (samples,) samples of equal numbers never share a sequence; None: all may.
    """
    packed = samples[_stable_order(budget[0] - tokens[samples].astype(np.int64))]
    rows = _best_fit(packed, tokens, images, budget, apart)
    if int(tokens[samples].sum()) < WELL_FILLED * (int(rows.max()) + 1) * budget[0]:
        in_order = _best_fit(samples, tokens, images, budget, apart)
        if in_order.max() < rows.max():
            packed, rows = samples, in_order
    return packed[_stable_order(rows)], np.bincount(rows)


def _packed_groups(
    samples: Int64Array, tokens: Integers, images: Integers, budget: tuple[int, int], prefixes: PrefixGroups
) -> tuple[Int64Array, Int64Array]:
    """Pack a window whose samples share prefixes: groups, or pieces of them, as samples. Returns as `_packed`."""
    items = prefixes.items(samples, tokens, budget[0])
    first = np.array([members[0] for members in items], np.int64)
    shared = prefixes.prefix_tokens[first].astype(np.int64)
    sizes = np.array([int(tokens[members].sum()) for members in items], np.int64)
    lengths = np.array([len(members) for members in items], np.int64)
    sizes -= shared * (lengths - 1)
    packed, num_items = _packed(np.arange(len(items)), sizes, images[first], budget, apart=prefixes.group[first])
    members = np.array([sample for item in packed.tolist() for sample in items[item]], np.int64)
    return members, np.add.reduceat(lengths[packed], np.cumsum(num_items) - num_items)


def _best_fit(
    samples: Int64Array,
    tokens: Integers,
    images: Integers,
    budget: tuple[int, int],
    apart: Integers | None = None,
) -> Int64Array:
    """(samples,) number of each sample's sequence: in this order, each goes where it leaves the fewest tokens free."""
    # Most of the time of a plan: nothing is called that need not be. An open sequence is one integer: its free tokens,
    # its number from 1 on, its free images. A sample is another one, whose number is 0: one comparison finds where its
    # tokens fit, and one subtraction puts it there.
    counts = images[samples].astype(np.int64)
    max_images = min(budget[1], int(counts.sum()) + 1)  # a limit that is never met may be of any size
    image_bits = max_images.bit_length()
    shift = image_bits + (len(samples) + 1).bit_length()
    image_mask, one_row, one_token = (1 << image_bits) - 1, 1 << image_bits, 1 << shift
    empty = (budget[0] << shift) + max_images
    end = (budget[0] + 1 << shift) + image_mask  # after all open sequences, with room for any sample
    open_rows, entries = [end], list[int]()  # open sequences are sorted
    groups: list[int] = [] if apart is None else apart[samples].tolist()
    groups_in: dict[int, set[int]] = {}
    for place_of_sample, sample in enumerate(((tokens[samples].astype(np.int64) << shift) + counts).tolist()):
        place = bisect_left(open_rows, sample)
        entry = open_rows[place]
        while (entry & image_mask) < (sample & image_mask) or (
            groups and groups[place_of_sample] in groups_in.get((entry & one_token - 1) >> image_bits, ())
        ):
            place += 1
            entry = open_rows[place]
        if entry == end:
            empty += one_row
            entry = empty - sample
        else:
            entry = open_rows.pop(place) - sample
        if groups:
            groups_in.setdefault((entry & one_token - 1) >> image_bits, set()).add(groups[place_of_sample])
        entries.append(entry)
        if entry >= one_token and entry & image_mask:  # free tokens, and images
            insort(open_rows, entry)
    return ((np.array(entries, np.int64) & one_token - 1) >> image_bits) - 1


def _shuffled(length: int, seed: int, epoch: int, stream: str) -> Int64Array:
    """A permutation of range(length) that depends only on the arguments."""
    start = hashlib.sha256(f"{stream} {seed} {epoch}".encode()).digest()[:8]
    state = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64(int.from_bytes(start, "little"))
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    # Each step is a bijection and the states differ: no two keys are equal, and any kind of sort gives this order.
    return np.argsort(state ^ (state >> np.uint64(31))).astype(np.int64)


def _stable_order(numbers: Integers) -> Int64Array:
    """The places of the numbers, from 0 on, in ascending order, equal ones in theirs."""
    is_short = int(numbers.max(initial=0)) < 1 << 16
    return np.argsort(
        numbers.astype(np.uint16) if is_short else numbers, kind="stable"
    )  # NumPy's radix sort is for these
