"""Cumulative sequence lengths of packed samples, known to the host without reading the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BOUNDS_BY = 16
PADDING_PIECE = 128  # tokens; padding that attended to all padding would cost as much as a sample of its length


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a sample. after: None for a whole sample; else the first token after the prefix of this
    one, which is in the first sample that has the prefix."""

    start: int
    end: int
    after: int | None


@dataclass(frozen=True, eq=False)
class CuSeqlens:
    """Bounds of the samples in one forward pass. No tuple: module wrappers move the tensors that they find in those."""

    # Both int32 and filled up to a multiple of 16 entries, so that few sizes occur and compiled code has few variants.
    bounds: Tensor  # (samples, 2) first token and end of each in the flattened sequences; always on the host
    device_bounds: Tensor  # (pieces,) first tokens of samples and pieces of padding, then the end, for varlen kernels
    packed: bool  # some sequence holds more than one sample, or padding
    # (blocks, 2) first token and end of each image whose tokens see each other, inside of samples; on the host.
    image_blocks: Tensor | None = None
    blocks_in_windows_only: bool = False  # in layers with windows; else in all layers
    # (prefixes, 3) first token and end of each prefix that samples share, and the end of its branches, which follow it;
    # on the host. The bounds above are then those of prefixes, branches and samples that share nothing.
    prefixes: Tensor | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[Sequence[int]],
        sequence_length: int,
        prefixes: Sequence[Sequence[tuple[int, int, int]]] = (),
    ) -> CuSeqlens:
        """lengths: of the samples in each sequence of `sequence_length` tokens; the rest of a sequence is padding.

        prefixes: of each sequence, by places in it (see the field); empty where no sequence has any.
        """
        samples: list[tuple[int, int]] = []
        starts: list[int] = []
        for number, of_sequence in enumerate(lengths):
            first = number * sequence_length
            ends = list(itertools.accumulate(of_sequence, initial=first))
            samples += itertools.pairwise(ends)
            starts += [*ends[:-1], *range(ends[-1], first + sequence_length, PADDING_PIECE)]
        starts += [len(lengths) * sequence_length] * (BOUNDS_BY - len(starts) % BOUNDS_BY)
        samples += [(0, 0)] * (len(starts) - len(samples))
        packed = any(list(of_sequence) != [sequence_length] for of_sequence in lengths)
        shared = _padded_spans(prefixes, sequence_length)
        return cls(
            torch.tensor(samples, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32), packed, prefixes=shared
        )

    def runs(self) -> list[Run]:
        """All tokens of samples, in runs: a whole sample, or after a prefix that a sample before has begun with, the
        rest of the next one up to where it ends, prefixes in it included.
        """
        spans = [] if self.prefixes is None else self.prefixes.tolist()
        after = {start: (end, stop) for start, end, stop in spans if end > start}
        runs: list[Run] = []
        around: list[tuple[int, int]] = []  # end of each prefix around a token, and the end of its branches
        for start, end in self.bounds.tolist():
            if start == end:
                continue
            while around and around[-1][1] <= start:
                around.pop()
            if around and around[-1][0] == start:
                runs[-1] = replace(runs[-1], end=end)
            else:
                runs.append(Run(start, end, around[-1][0] if around else None))
            if start in after:
                around.append(after[start])
        return runs

    def to(self, device: torch.device, *, non_blocking: bool = False) -> CuSeqlens:
        return replace(self, device_bounds=self.device_bounds.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> CuSeqlens:
        return replace(self, device_bounds=self.device_bounds.pin_memory())


def _padded_spans(prefixes: Sequence[Sequence[tuple[int, int, int]]], sequence_length: int) -> Tensor | None:
    """Prefixes by their places in the flattened sequences, filled up as all bounds; None for none."""
    spans = [
        tuple(number * sequence_length + at for at in span)
        for number, sequence_spans in enumerate(prefixes)
        for span in sequence_spans
    ]
    if not spans:
        return None
    return torch.tensor(spans + [(0, 0, 0)] * (-len(spans) % BOUNDS_BY), dtype=torch.int32)


def equal_lengths(tokens: int, samples: int) -> list[int]:
    """Lengths of `samples` samples that share the tokens as equally as possible."""
    longer = tokens % samples
    return [tokens // samples + (number < longer) for number in range(samples)]
