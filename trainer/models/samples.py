"""Where the samples of packed rows begin and end, as the host knows it from the rows themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LEAST_BOUNDS, LEAST_LONGEST = 16, 128  # below these a kernel gains nothing by a closer number
PADDING_PIECE = 128  # tokens; padding that attended to all padding would cost as much as a sample of its length


@dataclass(frozen=True, eq=False)
class Samples:
    """Of the rows of one forward pass. No tuple: wrappers of modules look for tensors in those, and move them.

    Counts are rounded up to powers of two, so that code which is compiled for them has few variants.
    """

    # (a power of two,), int32: slots at which samples begin, with rows one behind the other; then the end, repeated
    bounds: Tensor  # on the host, whatever device the rows are on
    device_bounds: Tensor  # the same, where the rows are
    longest: int  # tokens of the longest sample, at least
    packed: bool  # some row holds more than one sample, or padding

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], row_tokens: int) -> Samples:
        """Rows of `row_tokens` slots, each with samples of so many tokens; the rest of a row is padding."""
        pieces = [piece for row in rows for piece in (*row, *_padding(row_tokens - sum(row)))]
        starts = [0, *itertools.accumulate(pieces)]
        starts += [starts[-1]] * (_power_of_two(max(len(starts), LEAST_BOUNDS)) - len(starts))
        packed = any(len(row) != 1 or row[0] != row_tokens for row in rows)
        bounds = torch.tensor(starts, dtype=torch.int32)
        return cls(bounds, bounds, _power_of_two(max(*pieces, LEAST_LONGEST)), packed)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Samples:
        return replace(self, device_bounds=self.bounds.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Samples:
        return replace(self, bounds=self.bounds.pin_memory())


def _padding(tokens: int) -> list[int]:
    whole, rest = divmod(tokens, PADDING_PIECE)
    return [PADDING_PIECE] * whole + [rest] * (rest > 0)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
