"""Trained weights of a checkpoint, one tensor at a time: a reader for each checkpoint format. No process group.

Sharded tensors are put together as they are read, so no more than one is held. Only files that the commit protocol has
verified may be given: their metadata are pickles.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trainer.errors import ConfigError
from trainer.strategies.deepspeed import MODULE_FILE, PARTITION_FILE, SHAPES_FILE

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


class WholeModule:
    """ZeRO-1 and 2 keep the whole module on every rank; rank 0's file holds it."""

    def __init__(self, folder: Path) -> None:
        self._module = {
            name.removeprefix(MODULE_PREFIX): tensor for name, tensor in _mapped(folder / MODULE_FILE)["module"].items()
        }
        self.names: Set[str] = self._module.keys()

    def read(self, name: str) -> Tensor:
        return self._module[name]


class Partitions:
    """ZeRO-3 cuts each parameter into equal slices, one for each rank. A rank's file holds its slices end to end.

    Source of the layout: deepspeed/utils/zero_to_fp32.py. The last slices are filled up to the common length.
    """

    def __init__(self, folder: Path) -> None:
        saved = _mapped(folder / SHAPES_FILE)
        self._ranks = int(saved["dp_world_size"])
        files = [_mapped(folder / PARTITION_FILE.format(rank=rank)) for rank in range(self._ranks)]
        self._flat = [file["optimizer_state_dict"]["fp32_flat_groups"] for file in files]  # by rank and group
        self._places: dict[str, tuple[int, int, torch.Size]] = {}  # group, offset in each rank's slices, shape
        for group, shapes in enumerate(saved["param_shapes"]):
            offset = 0
            for name, shape in shapes.items():
                self._places[name.removeprefix(MODULE_PREFIX)] = (group, offset, shape)
                offset += self._slice(shape)
        for name, kept_as in saved["shared_params"].items():  # tied weights are kept once
            self._places[name.removeprefix(MODULE_PREFIX)] = self._places[kept_as.removeprefix(MODULE_PREFIX)]
        self.names: Set[str] = self._places.keys()

    def read(self, name: str) -> Tensor:
        group, offset, shape = self._places[name]
        slices = [flat[group].detach().narrow(0, offset, self._slice(shape)) for flat in self._flat]
        return torch.cat(slices)[: shape.numel()].view(shape)

    def _slice(self, shape: torch.Size) -> int:
        return -(-shape.numel() // self._ranks)


class _NotRead:
    """Stands for an object of DeepSpeed in a file of which only the tensors are wanted."""

    def __init__(self, *_: object) -> None:
        pass


DEEPSPEED_OBJECTS = ("deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.zero.config.ZeroStageEnum")


def _mapped(file: Path) -> dict[str, Any]:
    """A file of DeepSpeed: tensors are mapped, not read, and its own objects are not made."""
    with torch.serialization.safe_globals([(_NotRead, name) for name in DEEPSPEED_OBJECTS]):
        return dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))


def _deepspeed_weights(folder: Path) -> WeightReader:
    return Partitions(folder) if (folder / SHAPES_FILE).exists() else WholeModule(folder)


READERS: dict[str, Callable[[Path], WeightReader]] = {"dcp": DcpWeights, "deepspeed": _deepspeed_weights}


def open_weights(folder: Path, checkpoint_format: str) -> WeightReader:
    """The reader of a fetched checkpoint. Raises ConfigError for a format that this program does not know."""
    if checkpoint_format not in READERS:
        raise ConfigError(
            f"the checkpoint's format is {checkpoint_format!r}",
            expected=f"one of {', '.join(READERS)}",
            fix="export it with the version of vlmpipe that trained it",
        )
    return READERS[checkpoint_format](folder)
