"""Cumulative sequence lengths of packed samples, known to the host without reading the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BOUNDS_BY = 16
PADDING_PIECE = 128  # tokens; padding that attended to all padding would cost as much as a sample of its length


@dataclass(frozen=True, eq=False)
class CuSeqlens:
    """Of the rows of one forward pass. No tuple: wrappers of modules look for tensors in those, and move them."""

    # (a multiple of 16,), int32: slots at which samples begin, with rows one behind the other; then the end, repeated.
    # So code that is compiled for a number of them has few variants.
    bounds: Tensor  # on the host, whatever device the rows are on
    device_bounds: Tensor  # the same, where the rows are
    packed: bool  # some row holds more than one sample, or padding

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], sequence_length: int) -> CuSeqlens:
        """Rows of `sequence_length` slots, each with samples of so many tokens; the rest of a row is padding."""
        pieces = [piece for row in rows for piece in (*row, *_padding(sequence_length - sum(row)))]
        starts = [0, *itertools.accumulate(pieces)]
        starts += [starts[-1]] * (-len(starts) % BOUNDS_BY)
        packed = any(len(row) != 1 or row[0] != sequence_length for row in rows)
        bounds = torch.tensor(starts, dtype=torch.int32)
        return cls(bounds, bounds, packed)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> CuSeqlens:
        return replace(self, device_bounds=self.bounds.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> CuSeqlens:
        return replace(self, bounds=self.bounds.pin_memory())


def equal_lengths(tokens: int, samples: int) -> list[int]:
    """Of so many samples that share these tokens, as equally as can be."""
    longer = tokens % samples
    return [tokens // samples + (number < longer) for number in range(samples)]


def _padding(tokens: int) -> list[int]:
    whole, rest = divmod(tokens, PADDING_PIECE)
    return [PADDING_PIECE] * whole + [rest] * (rest > 0)
