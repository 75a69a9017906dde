"""Checkpoint support for shards that are not one block of their tensor.

A rank's shard of a fused query-key-value weight has rows of all three parts (`ColwiseFusedLinear`), and a partition of
DeepSpeed ZeRO cuts a flattened weight anywhere; DCP treats a shard as one block. Given each block with its offset, it
writes files that every other strategy can load.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

Block = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def with_pieces(state: Mapping[str, object]) -> dict[str, object]:
    """Wrap strided shards of a nested state as `TensorPieces`, which share its memory, so loading fills `state`."""
    return {name: _with_pieces(value) for name, value in state.items()}


def _with_pieces(value: object) -> object:
    if isinstance(value, DTensor):
        return _pieces_of_strided(value)
    return with_pieces(value) if isinstance(value, Mapping) else value


def _pieces_of_strided(tensor: DTensor) -> Tensor:
    mesh, placement = tensor.device_mesh, tensor.placements[-1]
    if not isinstance(placement, _StridedShard):  # FSDP's own strided placement is on an earlier axis
        return tensor
    parts, ranks, number = int(placement.split_factor), mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    rows = tensor.shape[0] // (parts * ranks)  # of each piece
    first, local = 0, tensor.to_local().detach()
    if mesh.ndim > 1:  # FSDP has cut the pieces, laid end to end, into slices of equal size but for the last
        first = min(parts * rows, mesh.get_local_rank(0) * -(-parts * rows // mesh.size(0)))
    pieces = {}
    for part in range(parts):
        start, end = max(first, part * rows), min(first + len(local), (part + 1) * rows)
        if start < end:
            place = (part * ranks + number) * rows + start - part * rows
            pieces[torch.Size((place, *[0] * (tensor.ndim - 1)))] = local[start - first : end - first]
    return TensorPieces(tensor.shape, local, pieces)


def pieces_of_range(shape: torch.Size, start: int, flat: Tensor) -> TensorPieces:
    """The elements from `start` on of a flattened tensor of that shape, which `flat` holds and shares."""
    pieces, at = {}, 0
    for offsets, sizes in blocks_of_range(shape, start, start + len(flat)):
        size = math.prod(sizes)
        pieces[torch.Size(offsets)] = flat[at : at + size].view(sizes)
        at += size
    return TensorPieces(shape, flat, pieces)


def blocks_of_range(shape: Sequence[int], start: int, end: int) -> Iterator[Block]:
    """Blocks whose elements, one block after the other, are those from `start` to `end` of the flattened tensor."""
    if start >= end:
        return
    if len(shape) < 2:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows
    if first > last:  # inside of one row
        yield from _in_row(shape, last, start - last * row, end - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: Sequence[int], number: int, start: int, end: int) -> Iterator[Block]:
    for offsets, sizes in blocks_of_range(shape[1:], start, end):
        yield (number, *offsets), (1, *sizes)


class TensorPieces(Tensor):
    """Answers DCP for a tensor with several blocks on this rank: views by their offsets."""

    pieces: dict[torch.Size, Tensor]

    @staticmethod
    def __new__(cls, shape: torch.Size, local: Tensor, pieces: dict[torch.Size, Tensor]) -> TensorPieces:
        """local: of the type and on the device of the pieces."""
        made: TensorPieces = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.pieces = pieces
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a disabled function
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        raise NotImplementedError(f"{func}: pieces are for checkpoints only")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offset, piece.size()),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.size(),
                ),
            )
            for offset, piece in self.pieces.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, piece.size()) for offset, piece in self.pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.pieces[index.offset]
