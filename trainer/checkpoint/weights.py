"""Trained weights of a checkpoint, one tensor at a time: a reader for each checkpoint format. No process group.

Sharded tensors are put together as they are read, so no more than one is held. Only files that the commit protocol has
verified may be given: their metadata are pickles.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Set
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trainer.errors import ConfigError

MODULE_PREFIX = "model."  # the training module holds the Hugging Face model under this name


class WeightReader(Protocol):
    """Weights by the names of the Hugging Face model's state dict."""

    names: Set[str]

    def read(self, name: str) -> Tensor: ...


class DcpWeights:
    """What `save_dcp` wrote: DDP's whole tensors, or FSDP's slices of every rank."""

    def __init__(self, folder: Path) -> None:
        self._reader = _OneMetadata(folder)
        self._prefix = f"model.{MODULE_PREFIX}"  # of the state's entry, then of the module
        self._entries = {
            key.removeprefix(self._prefix): entry
            for key, entry in self._reader.read_metadata().state_dict_metadata.items()
            if key.startswith(self._prefix) and isinstance(entry, TensorStorageMetadata)
        }
        self.names: Set[str] = self._entries.keys()

    def read(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as asked for
            dcp.load({self._prefix + name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class _OneMetadata(dcp.FileSystemReader):
    """Reads the metadata once: every `dcp.load` asks for them, and they name every tensor of the checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = super().read_metadata()

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        return self._metadata


class DeepSpeedWeights:
    """ZeRO-1 and 2 keep the whole module on every rank; rank 0's file holds it. It is mapped, not read."""

    def __init__(self, folder: Path) -> None:
        from trainer.strategies.deepspeed import MODULE_FILE

        saved = torch.load(folder / MODULE_FILE, map_location="cpu", weights_only=True, mmap=True)
        self._module = {name.removeprefix(MODULE_PREFIX): tensor for name, tensor in saved["module"].items()}
        self.names: Set[str] = self._module.keys()

    def read(self, name: str) -> Tensor:
        return self._module[name]


READERS: dict[str, Callable[[Path], WeightReader]] = {"dcp": DcpWeights, "deepspeed": DeepSpeedWeights}


def open_weights(folder: Path, checkpoint_format: str) -> WeightReader:
    """The reader of a fetched checkpoint. Raises ConfigError for a format that this program does not know."""
    if checkpoint_format not in READERS:
        raise ConfigError(
            f"the checkpoint's format is {checkpoint_format!r}",
            expected=f"one of {', '.join(READERS)}",
            fix="export it with the version of vlmpipe that trained it",
        )
    return READERS[checkpoint_format](folder)
