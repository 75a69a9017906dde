"""Samples of packed sequences that share a call of a kernel that takes equally long ones.

A long sample is read where it lies. Short ones of like lengths are copied side by side, which costs less than calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_JOINED = 1 << 13  # numbers in a sample's query up to which a call of its own costs more than copying it
LIKE = 0.8  # of the longest sample's tokens: shorter ones do not share its call

Spans = tuple[tuple[int, int], ...]  # first token and number of tokens of each


@dataclass(frozen=True)
class LongSample:
    """A sample with a call of its own."""

    start: int
    tokens: int

    def read(self, heads: Tensor, *, repeat: bool = True) -> Tensor:
        """(heads, all tokens, ...) -> (1, heads, tokens, ...), in the same memory."""
        return heads.narrow(1, self.start, self.tokens).unsqueeze(0)

    def write(self, result: Tensor, heads: Tensor) -> None:
        """The inverse of `read`."""
        self.read(heads).copy_(result)


@dataclass(frozen=True)
class ShortSamples:
    """Several of like lengths. A shorter one repeats its last token, which those before it do not see."""

    index: Tensor  # (samples, tokens of the longest) their tokens
    is_own: Tensor  # (samples, tokens of the longest), false for repetitions
    is_real: Tensor  # where it is true in the flattened index

    def read(self, heads: Tensor, *, repeat: bool = True) -> Tensor:
        """(heads, all tokens, ...) -> (samples, heads, tokens, ...). repeat: False reads zeros for repetitions."""
        group = heads.transpose(0, 1).index_select(0, self.index.flatten()).unflatten(0, self.index.shape)
        return (group if repeat else group * self.is_own[..., None, None]).transpose(1, 2)

    def write(self, result: Tensor, heads: Tensor) -> None:
        """The inverse of `read`."""
        rows, index = result.transpose(1, 2).flatten(0, 1).to(heads.dtype), self.index.flatten()
        heads.transpose(0, 1).index_copy_(0, index.index_select(0, self.is_real), rows.index_select(0, self.is_real))


Group = LongSample | ShortSamples


def rectangles_of(queries: Tensor, keys: Tensor) -> Sequence[tuple[LongSample, LongSample]]:
    """A call for each piece of queries with its piece of keys. queries, keys: bounds (see `VarlenArgs.keys`)."""
    pieces = [[LongSample(*span) for span in _spans(bounds)] for bounds in (queries, keys)]
    return list(zip(*pieces, strict=True))


def _spans(bounds: Tensor) -> Spans:
    return tuple((start, end - start) for start, end in bounds.tolist() if start < end)


def groups_of(bounds: Tensor, query: Tensor) -> tuple[Sequence[Group], Spans]:
    """Calls for the samples with these bounds (see `CuSeqlens`), and the padding between them."""
    spans = _spans(bounds)
    edges = [0, *(edge for start, tokens in spans for edge in (start, start + tokens)), query.shape[:2].numel()]
    padding = tuple((end, start - end) for end, start in zip(edges[::2], edges[1::2], strict=True) if end < start)
    return _groups(spans, MAX_JOINED // query.shape[2:].numel(), query.device), padding


def groups_of_like_lengths(bounds: Tensor, device: torch.device) -> Sequence[Group]:
    """Rows for the samples with these bounds (see `CuSeqlens`): those of like lengths share a call however long."""
    return _groups(_spans(bounds), sys.maxsize, device)


def clear(padding: Spans, *heads: Tensor) -> None:
    """Put zeros into padding of tensors (heads, all tokens, ...)."""
    for start, tokens in padding:
        for head in heads:
            head.narrow(1, start, tokens).zero_()


@functools.lru_cache(maxsize=32)  # all layers ask for the same
def _groups(samples: Spans, short: int, device: torch.device) -> list[Group]:
    """short: tokens up to which samples share a call with those of like length."""
    groups: list[Group] = [LongSample(*sample) for sample in samples if sample[1] > short]
    left = sorted((sample for sample in samples if sample[1] <= short), key=lambda sample: -sample[1])
    while left:
        similar = sum(tokens >= LIKE * left[0][1] for _, tokens in left)
        groups.append(_joined(left[:similar], device) if similar > 1 else LongSample(*left[0]))
        left = left[similar:]
    return groups


def _joined(samples: Sequence[tuple[int, int]], device: torch.device) -> ShortSamples:
    starts, lengths = torch.tensor(samples)[..., None].unbind(1)  # (samples, 1) each
    place = torch.arange(int(lengths.max()))
    is_own = place < lengths
    index, mine_index = starts + place.minimum(lengths - 1), is_own.flatten().nonzero().flatten()
    return ShortSamples(index.to(device), is_own.to(device), mine_index.to(device))
