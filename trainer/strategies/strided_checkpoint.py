"""Checkpoint support for non-contiguous shards.

A rank's shard of a fused query-key-value weight has rows of all three parts (`ColwiseFusedLinear`), but DCP treats a
DTensor's shard as one block. Given each block with its offset, it writes files that every other strategy can load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard


def with_strided_shards(state: Mapping[str, object]) -> dict[str, Any]:
    """Wrap such tensors of a nested state as `StridedShards`, which share its memory, so loading fills `state`."""
    return {name: _with_strided_shards(value) for name, value in state.items()}


def _with_strided_shards(value: object) -> object:
    if isinstance(value, DTensor):
        return _strided_shards_of(value)
    return with_strided_shards(value) if isinstance(value, Mapping) else value


def _strided_shards_of(tensor: DTensor) -> Tensor:
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
    return StridedShards(tensor, pieces)


class StridedShards(Tensor):
    """Answers DCP for a tensor with several blocks on this rank: views by their offsets."""

    pieces: dict[torch.Size, Tensor]

    @staticmethod
    def __new__(cls, whole: Tensor, pieces: dict[torch.Size, Tensor]) -> StridedShards:
        made: StridedShards = Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype, device=whole.device)
        made.pieces = pieces
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a disabled function
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> Any:
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
