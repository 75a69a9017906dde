"""Blocks of a range of a flattened tensor."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.strategies.tensor_pieces import blocks_of_range, pieces_of_range


@st.composite
def ranges(draw: st.DrawFn) -> tuple[torch.Size, int, int]:
    shape = torch.Size(draw(st.lists(st.integers(1, 4), max_size=4)))
    start, end = sorted(draw(st.lists(st.integers(0, math.prod(shape)), min_size=2, max_size=2)))
    return shape, start, end


@given(ranges())
def test_blocks_have_the_elements_of_the_range_in_their_order(case: tuple[torch.Size, int, int]) -> None:
    shape, start, end = case
    whole = torch.arange(math.prod(shape)).view(shape)
    blocks = list(blocks_of_range(shape, start, end))
    read = [
        number
        for offsets, sizes in blocks
        for number in whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].flatten()
    ]
    assert read == list(range(start, end))
    assert len(blocks) <= max(1, 2 * len(shape) - 1)


@given(ranges())
def test_what_is_loaded_into_the_pieces_fills_the_flat_tensor(case: tuple[torch.Size, int, int]) -> None:
    shape, start, end = case
    whole, flat = torch.arange(math.prod(shape)).view(shape), torch.full((end - start,), -1)
    tensor = pieces_of_range(shape, start, flat)
    assert tensor.shape == shape
    for offsets, piece in tensor.pieces.items():
        piece.copy_(whole[tuple(slice(at, at + size) for at, size in zip(offsets, piece.shape, strict=True))])
    assert flat.tolist() == list(range(start, end))
