"""Groups of samples that share a prefix, in the order of an epoch and in packed sequences.

Samples of a group stand next to each other in the order of an epoch, and in a sequence they take the tokens and images
of their prefix once. All is a pure function of the index, the settings, seed and epoch, as packing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16  # of a prefix

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class PrefixGroups:
    """Groups of samples that share a prefix."""

    group: Int32Array  # (samples,) number of each sample's group; one without a prefix is a group of its own
    prefix_tokens: Int32Array  # (samples,) 0 where none is shared
    max_branches: int = 0  # of a prefix in a sequence; 0: as many as fit

    @classmethod
    def of(cls, keys: NDArray[np.uint8], prefix_tokens: Int32Array, max_branches: int) -> PrefixGroups:
        """The groups of samples with equal keys, (samples, KEY_BYTES)."""
        _, inverse = np.unique(keys, axis=0, return_inverse=True)
        group: Int32Array = inverse.reshape(-1).astype(np.int32)
        alone = np.flatnonzero(prefix_tokens == 0)
        group[alone] = int(group.max(initial=-1)) + 1 + np.arange(len(alone), dtype=np.int32)
        return cls(group, prefix_tokens, max_branches)

    def part(self, samples: slice | Int64Array) -> PrefixGroups:
        """The groups of these samples, by their places among these."""
        return replace(self, group=self.group[samples], prefix_tokens=self.prefix_tokens[samples])

    def together(self, order: Int64Array, places: Int64Array) -> Int64Array:
        """The order, with each group's samples next to each other where its first one was, in pieces of at most
        `max_branches`.

        places: (samples,) what each place in the order belongs to, such as a group of shards: groups stay inside.
        """
        groups = self.group[order].astype(np.int64)
        _, group = np.unique(places * (int(groups.max(initial=0)) + 1) + groups, return_inverse=True)
        if self.max_branches:
            group = _pieces(group, self.max_branches)
        _, first, piece = np.unique(group, return_index=True, return_inverse=True)
        gathered: Int64Array = order[np.argsort(first[piece.reshape(-1)], kind="stable")]
        return gathered

    def is_first(self, members: Int64Array, offsets: Int64Array) -> NDArray[np.bool_]:
        """(members,) whether a sample brings its images into its sequence: the samples after it may share its prefix.
        One without a prefix brings them each time that it is drawn.

        members, offsets: see `PackingPlan`.
        """
        groups = self.group[members]
        is_first = np.ones(len(members), np.bool_)
        is_first[1:] = (groups[1:] != groups[:-1]) | (self.prefix_tokens[members[1:]] == 0)
        is_first[offsets[:-1][offsets[:-1] < len(members)]] = True
        return is_first

    def shared_tokens(self, samples: Sequence[int]) -> list[int]:
        """Tokens of each of a sequence's samples that the one before it has, too: those of their prefix."""
        numbers = np.asarray(samples, np.int64)
        groups, tokens = self.group[numbers], self.prefix_tokens[numbers].astype(np.int64)
        tokens[:1] = 0
        tokens[1:] *= groups[1:] == groups[:-1]
        return list(map(int, tokens))

    def stored_tokens(self, members: Int64Array, offsets: Int64Array, tokens: NDArray[np.integer]) -> Int64Array:
        """(members,) tokens that each sample adds to its sequence. tokens: (samples,) of whole samples."""
        shared = np.where(self.is_first(members, offsets), 0, self.prefix_tokens[members])
        stored: Int64Array = tokens[members].astype(np.int64) - shared
        return stored


def _pieces(group: Int64Array, most: int) -> Int64Array:
    """Number of the piece of each place: groups in pieces of at most `most`, nearly equal, by their order."""
    order = np.argsort(group, kind="stable")
    _, start, count = np.unique(group[order], return_index=True, return_counts=True)
    rank = np.empty_like(group)
    rank[order] = np.arange(len(group)) - np.repeat(start, count)
    size = count[group]
    pieces = -(-size // most)
    numbers: Int64Array = np.concatenate([[0], np.cumsum(-(-count // most))])[:-1][group] + rank * pieces // size
    return numbers
