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
    """Bounds of the samples in one forward pass. No tuple: module wrappers move the tensors that they find in those."""

    # (a multiple of 16,) int32: first tokens of samples in the flattened sequences, then the end, repeated so that few
    # sizes occur and compiled code has few variants.
    bounds: Tensor  # always on the host
    device_bounds: Tensor  # the same, on the sequences' device
    packed: bool  # some sequence holds more than one sample, or padding

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], sequence_length: int) -> CuSeqlens:
        """lengths: of the samples in each sequence of `sequence_length` tokens; the rest of a sequence is padding."""
        pieces = [piece for own in lengths for piece in (*own, *_padding(sequence_length - sum(own)))]
        starts = [0, *itertools.accumulate(pieces)]
        starts += [starts[-1]] * (-len(starts) % BOUNDS_BY)
        packed = any(list(own) != [sequence_length] for own in lengths)
        bounds = torch.tensor(starts, dtype=torch.int32)
        return cls(bounds, bounds, packed)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> CuSeqlens:
        return replace(self, device_bounds=self.bounds.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> CuSeqlens:
        return replace(self, bounds=self.bounds.pin_memory())


def equal_lengths(tokens: int, samples: int) -> list[int]:
    """Lengths of `samples` samples that share the tokens as equally as possible."""
    longer = tokens % samples
    return [tokens // samples + (number < longer) for number in range(samples)]


def _padding(tokens: int) -> list[int]:
    whole, rest = divmod(tokens, PADDING_PIECE)
    return [PADDING_PIECE] * whole + [rest] * (rest > 0)
