"""Reads trained weights of each checkpoint format one tensor at a time, by the ranges of its files that hold them.

Needs no process group and no disk. Pickles are read after the commit protocol has verified their bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from vlmpipe.trainer.checkpoint.verified_files import CheckpointFiles
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.strategies.deepspeed.engine import EMA_FILE, MODULE_FILE, PARTITION_FILE, SHAPES_FILE
from vlmpipe.trainer.strategies.torch_base import EMA, METADATA_FILE

OUTLINE_BUFFER_BYTES = 4096  # torch reads the directory of a file in pieces of some bytes
MODULE_PREFIX = "model."  # the training module holds the Hugging Face model under this name


@dataclass(frozen=True)
class WeightReader:
    """Weights by the names of the Hugging Face model's state dict."""

    names: Set[str]
    read: Callable[[str], Tensor]


def _dcp_weights(files: CheckpointFiles, *, averaged: bool) -> WeightReader:
    """Torch's distributed checkpoint format, of DDP, FSDP and the model-parallel strategies."""
    metadata, prefix = pickle.loads(files.read(METADATA_FILE)), f"{EMA if averaged else 'model'}.{MODULE_PREFIX}"
    entries = {
        key.removeprefix(prefix): entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }

    def read(name: str) -> Tensor:
        entry = entries[name]
        places = [metadata.storage_data[MetadataIndex(prefix + name, chunk.offsets)] for chunk in entry.chunks]
        wanted = [(place.relative_path, place.offset, place.offset + place.length) for place in places]
        tensor = torch.empty(0)
        for chunk, item in zip(entry.chunks, files.read_all(wanted), strict=True):
            part: Tensor = torch.load(io.BufferedReader(_Stream(item)), map_location="cpu", weights_only=True)
            if part.shape == entry.size:
                return part
            if not tensor.numel():
                tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            tensor[_place_of(chunk)] = part
        return tensor

    return WeightReader(entries.keys(), read)


def _place_of(chunk: ChunkStorageMetadata) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _deepspeed_weights(files: CheckpointFiles, *, averaged: bool) -> WeightReader:
    if SHAPES_FILE in files.sizes_bytes:
        return _zero3_weights(files, averaged=averaged)
    return _zero2_weights(files, averaged=averaged)


def _zero3_weights(files: CheckpointFiles, *, averaged: bool) -> WeightReader:
    """ZeRO-3: each parameter is cut into equal slices, the last one padded; a rank's file concatenates its slices.

    Source: deepspeed/utils/zero_to_fp32.py.
    """
    saved = _outline(files, SHAPES_FILE)
    ranks = int(saved["dp_world_size"])
    flat = _averages(files, ranks) if averaged else _masters(files, ranks, "fp32_flat_groups")

    def slice_of(shape: torch.Size) -> int:
        return -(-shape.numel() // ranks)

    places = _places(saved, slice_of)

    def read(name: str) -> Tensor:
        group, offset, shape = places[name]
        slices = [groups[group].slice(offset, offset + slice_of(shape)) for groups in flat]
        return _joined(files, slices)[: shape.numel()].view(shape)

    return WeightReader(places.keys(), read)


def _zero2_weights(files: CheckpointFiles, *, averaged: bool) -> WeightReader:
    """ZeRO-1 and 2: a group's concatenated parameters, partitioned over ranks. Source as above.

    Of the optimizer's weights, or their averages: the module's own, which precision bf16 rounds, are not read.
    """
    saved = _outline(files, MODULE_FILE)
    ranks = int(saved["dp_world_size"])
    masters = "single_partition_of_fp32_groups"
    flat = _averages(files, ranks) if averaged else _masters(files, ranks, masters)
    places = _places(saved, lambda shape: shape.numel())

    def read(name: str) -> Tensor:
        group, start, shape = places[name]
        end, slices = start + shape.numel(), []
        for partition in (groups[group] for groups in flat):
            if start < partition.numel and end > 0:
                slices.append(partition.slice(max(0, start), min(end, partition.numel)))
            start, end = start - partition.numel, end - partition.numel
        return _joined(files, slices).view(shape)

    return WeightReader(places.keys(), read)


@dataclass(frozen=True)
class _Stored:
    """A contiguous tensor in a file: its first byte, and how many numbers of which type it has."""

    file: str
    offset: int
    numel: int
    dtype: torch.dtype

    @classmethod
    def of(cls, file: str, outlined: Tensor) -> _Stored:
        if not outlined.is_contiguous():
            raise ConfigError(
                f"{file} has a flat tensor that is not contiguous",
                fix="export it with the version of vlmpipe that trained it",
            )
        begin = outlined.untyped_storage()._checkpoint_offset
        assert begin is not None, "torch.load sets it for fake tensors"
        offset = begin + int(outlined.storage_offset()) * outlined.dtype.itemsize
        return cls(file, offset, outlined.numel(), outlined.dtype)

    def slice(self, start: int, end: int) -> _Stored:
        return _Stored(self.file, self.offset + start * self.dtype.itemsize, end - start, self.dtype)


def _joined(files: CheckpointFiles, slices: Sequence[_Stored]) -> Tensor:
    """One flat tensor of these slices."""
    dtype = slices[0].dtype
    joined = torch.empty(sum(one.numel for one in slices), dtype=dtype)
    wanted = [(one.file, one.offset, one.offset + one.numel * dtype.itemsize) for one in slices]
    at = 0
    for one, data in zip(slices, files.read_all(wanted), strict=True):
        if one.numel:
            writable = bytearray(data) if data.readonly else data  # else torch warns
            joined[at : at + one.numel] = torch.frombuffer(writable, dtype=dtype)
        at += one.numel
    return joined


def _places(saved: Mapping[str, Any], size: Callable[[torch.Size], int]) -> dict[str, tuple[int, int, torch.Size]]:
    """Group, offset and shape of each trained parameter, `size(shape)` elements of which are contiguous in its group.

    Each under its first name, as in the checkpoints of other strategies: a tied head is the embedding.
    """
    places: dict[str, tuple[int, int, torch.Size]] = {}
    for group, shapes in enumerate(saved["param_shapes"]):
        offset = 0
        for name, shape in shapes.items():
            places[name.removeprefix(MODULE_PREFIX)] = (group, offset, shape)
            offset += size(shape)
    return places


def _averages(files: CheckpointFiles, ranks: int) -> list[list[_Stored]]:
    return [_stored(file, _outline(files, file)) for file in (EMA_FILE.format(rank=rank) for rank in range(ranks))]


def _masters(files: CheckpointFiles, ranks: int, name: str) -> list[list[_Stored]]:
    """The optimizer's fp32 weights by rank and group. Files that DeepSpeed's bf16 engine wrote have a prefix."""
    partitions = [PARTITION_FILE.format(rank=rank) for rank in range(ranks)]
    if partitions[0] not in files.sizes_bytes:
        folder, _, _ = partitions[0].rpartition("/")
        partitions = [f"{folder}/bf16_{file.rpartition('/')[2]}" for file in partitions]
    return [_stored(file, _outline(files, file)["optimizer_state_dict"][name]) for file in partitions]


def _stored(file: str, groups: Sequence[Tensor]) -> list[_Stored]:
    return [_Stored.of(file, group.detach()) for group in groups]


class _Ignored:
    """Replaces DeepSpeed's objects in a file of which only the tensors are read."""

    def __init__(self, *_: object) -> None:
        pass


DEEPSPEED_OBJECTS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.bf16_optimizer.fragment_address",
    "builtins.getattr",  # by which Python 3.11.0 to 3.11.3 pickle members of an Enum; here it reads no attribute
)


def _outline(files: CheckpointFiles, file: str) -> Any:
    """A file of torch.save without the numbers of its tensors, which know their place in it, and without DeepSpeed's
    own objects. Reads the directory of the file and the pickle."""
    with torch.serialization.safe_globals([(_Ignored, name) for name in DEEPSPEED_OBJECTS]), FakeTensorMode():
        return torch.load(
            io.BufferedReader(_FileStream(files, file), OUTLINE_BUFFER_BYTES), map_location="cpu", weights_only=True
        )


class _Stream(io.RawIOBase):
    """A file of bytes in memory, which are not copied."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def taken(self, start: int, end: int) -> memoryview:
        return self._data[start:end]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size_bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self.taken(self._at, min(self._at + len(buffer), self.size_bytes))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _FileStream(_Stream):
    """A checkpoint's file of which little is read."""

    def __init__(self, files: CheckpointFiles, file: str) -> None:
        super().__init__(memoryview(b""))
        self._files, self._file = files, file

    @property
    def size_bytes(self) -> int:
        return self._files.sizes_bytes[self._file]

    def taken(self, start: int, end: int) -> memoryview:
        return self._files.read(self._file, start, max(start, end))


READERS: dict[str, Callable[..., WeightReader]] = {"dcp": _dcp_weights, "deepspeed": _deepspeed_weights}


def holds_average(files: CheckpointFiles, checkpoint_format: str) -> bool:
    """Return whether a checkpoint has an average of the weights."""
    if checkpoint_format == "deepspeed":
        return EMA_FILE.format(rank=0) in files.sizes_bytes
    return bool(open_weights(files, checkpoint_format, averaged=True).names)


def open_weights(files: CheckpointFiles, checkpoint_format: str, *, averaged: bool = False) -> WeightReader:
    """The reader of a checkpoint's weights, or of their average. Raises ConfigError for an unknown format.

    Both raise DamagedError for bytes that are not those that were saved.
    """
    if checkpoint_format not in READERS:
        raise ConfigError(
            f"the checkpoint's format is {checkpoint_format!r}",
            expected=f"one of {', '.join(READERS)}",
            fix="export it with the version of vlmpipe that trained it",
        )
    return READERS[checkpoint_format](files, averaged=averaged)
