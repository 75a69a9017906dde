"""Reads trained weights of a checkpoint one tensor at a time, by the ranges of its files that hold them.

Needs no process group and no disk. Pickles are read after the commit protocol has verified their bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from vlmpipe.trainer.checkpoint.verified_files import CheckpointFiles
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.strategies.named_checkpoint import EMA, FORMAT, METADATA_FILE

MODULE_PREFIX = "model."  # the training module holds the Hugging Face model under this name


@dataclass(frozen=True)
class WeightReader:
    """Weights by the names of the Hugging Face model's state dict."""

    names: Set[str]
    read: Callable[[str], Tensor]


def _weights(files: CheckpointFiles, *, averaged: bool) -> WeightReader:
    """Torch's distributed checkpoint format, of all strategies."""
    metadata, prefix = pickle.loads(files.read(METADATA_FILE)), f"{EMA if averaged else 'model'}.{MODULE_PREFIX}"
    entries = {
        key.removeprefix(prefix): entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }

    def read(name: str) -> Tensor:
        entry = entries[name]
        places = [metadata.storage_data[MetadataIndex(prefix + name, chunk.offsets)] for chunk in entry.chunks]
        ranges = [(place.relative_path, place.offset, place.offset + place.length) for place in places]
        tensor = torch.empty(0)
        for chunk, item in zip(entry.chunks, files.read_all(ranges), strict=True):
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


def holds_average(files: CheckpointFiles, checkpoint_format: str) -> bool:
    """Return whether a checkpoint has an average of the weights."""
    return bool(open_weights(files, checkpoint_format, averaged=True).names)


def open_weights(files: CheckpointFiles, checkpoint_format: str, *, averaged: bool = False) -> WeightReader:
    """The reader of a checkpoint's weights, or of their average. Raises ConfigError for an unknown format.

    Both raise DamagedError for bytes that are not those that were saved.
    """
    if checkpoint_format != FORMAT:
        raise ConfigError(
            f"the checkpoint's format is {checkpoint_format!r}",
            expected=FORMAT,
            fix="export it with the version of vlmpipe that trained it",
        )
    return _weights(files, averaged=averaged)
