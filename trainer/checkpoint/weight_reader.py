"""Reads trained weights of each checkpoint format one tensor at a time, without a process group.

Reads pickles: the commit protocol must have verified the files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trainer.errors import ConfigError
from trainer.strategies.deepspeed.engine import EMA_FILE, MODULE_FILE, PARTITION_FILE, SHAPES_FILE
from trainer.strategies.torch_base import EMA

MODULE_PREFIX = "model."  # the training module holds the Hugging Face model under this name


class WeightReader(Protocol):
    """Weights by the names of the Hugging Face model's state dict."""

    names: Set[str]

    def read(self, name: str) -> Tensor: ...


class DcpWeights:
    """Weights in torch's distributed checkpoint format, of DDP, FSDP and the model-parallel strategies."""

    def __init__(self, folder: Path, *, averaged: bool = False) -> None:
        self._reader = _OneMetadata(folder)
        self._prefix = f"{EMA if averaged else 'model'}.{MODULE_PREFIX}"
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
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # by no_dist
            dcp.load({self._prefix + name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class _OneMetadata(dcp.FileSystemReader):
    """Caches the metadata, which every `dcp.load` reads in full."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = super().read_metadata()

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        return self._metadata


class Partitions:
    """Weights of ZeRO-3: each parameter is cut into equal slices, the last one padded; a rank's file concatenates its
    slices. Source: deepspeed/utils/zero_to_fp32.py."""

    def __init__(self, folder: Path, *, averaged: bool = False) -> None:
        saved = _mapped(folder / SHAPES_FILE)
        self._ranks = int(saved["dp_world_size"])
        self._flat = _averages(folder, self._ranks) if averaged else self._weights(folder)  # by rank and group
        self._places = _places(saved, self._slice)
        self.names: Set[str] = self._places.keys()

    def _weights(self, folder: Path) -> list[list[Tensor]]:
        return [state["optimizer_state_dict"]["fp32_flat_groups"] for state in _optimizer_states(folder, self._ranks)]

    def read(self, name: str) -> Tensor:
        group, offset, shape = self._places[name]
        slices = [flat[group].detach().narrow(0, offset, self._slice(shape)) for flat in self._flat]
        return torch.cat(slices)[: shape.numel()].view(shape)

    def _slice(self, shape: torch.Size) -> int:
        return -(-shape.numel() // self._ranks)


class Flattened:
    """The optimizer's weights, or their averages, of ZeRO-1 and 2: a group's concatenated parameters, partitioned over
    ranks. Not the module's own weights, which precision bf16 rounds. Source as above."""

    def __init__(self, folder: Path, *, averaged: bool = False) -> None:
        saved = _mapped(folder / MODULE_FILE)
        ranks = int(saved["dp_world_size"])
        self._flat = _averages(folder, ranks) if averaged else _flat_weights(folder, ranks)  # by rank and group
        self._places = _places(saved, lambda shape: shape.numel())
        self.names: Set[str] = self._places.keys()

    def read(self, name: str) -> Tensor:
        group, start, shape = self._places[name]
        end, found = start + shape.numel(), []
        for partition in (flat[group].detach() for flat in self._flat):
            found.append(partition[max(0, start) : max(0, end)])
            start, end = start - len(partition), end - len(partition)
        return torch.cat(found).view(shape)


def _places(saved: Mapping[str, Any], size: Callable[[torch.Size], int]) -> dict[str, tuple[int, int, torch.Size]]:
    """Group, offset and shape of each parameter, `size(shape)` elements of which are contiguous in its group."""
    places: dict[str, tuple[int, int, torch.Size]] = {}
    for group, shapes in enumerate(saved["param_shapes"]):
        offset = 0
        for name, shape in shapes.items():
            places[name.removeprefix(MODULE_PREFIX)] = (group, offset, shape)
            offset += size(shape)
    for name, tied_to in saved["shared_params"].items():
        places[name.removeprefix(MODULE_PREFIX)] = places[tied_to.removeprefix(MODULE_PREFIX)]
    return places


def _averages(folder: Path, ranks: int) -> list[list[Tensor]]:
    files = [folder / EMA_FILE.format(rank=rank) for rank in range(ranks)]
    return [torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in files]


def _flat_weights(folder: Path, ranks: int) -> list[list[Tensor]]:
    states = _optimizer_states(folder, ranks)
    return [state["optimizer_state_dict"]["single_partition_of_fp32_groups"] for state in states]


def _optimizer_states(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Of each rank. DeepSpeed names the files by whether its bf16 engine wrote them."""
    names = [PARTITION_FILE.format(rank=rank) for rank in range(ranks)]
    found = [folder / name for name in names]
    if not found[0].exists():
        found = [path.with_name(f"bf16_{path.name}") for path in found]
    return [_mapped(path) for path in found]


class _Ignored:
    """Replaces DeepSpeed's objects in a file of which only the tensors are read."""

    def __init__(self, *_: object) -> None:
        pass


DEEPSPEED_OBJECTS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.bf16_optimizer.fragment_address",
)


def _mapped(file: Path) -> dict[str, Any]:
    """A file of DeepSpeed, with memory-mapped tensors and without its own objects."""
    with torch.serialization.safe_globals([(_Ignored, name) for name in DEEPSPEED_OBJECTS]):
        return dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))


def _deepspeed_weights(folder: Path, *, averaged: bool) -> WeightReader:
    if (folder / SHAPES_FILE).exists():
        return Partitions(folder, averaged=averaged)
    return Flattened(folder, averaged=averaged)


READERS: dict[str, Callable[..., WeightReader]] = {"dcp": DcpWeights, "deepspeed": _deepspeed_weights}


def holds_average(folder: Path, checkpoint_format: str) -> bool:
    """Whether a fetched checkpoint has an average of the weights."""
    if checkpoint_format == "deepspeed":
        return (folder / EMA_FILE.format(rank=0)).exists()
    return bool(open_weights(folder, checkpoint_format, averaged=True).names)


def open_weights(folder: Path, checkpoint_format: str, *, averaged: bool = False) -> WeightReader:
    """The reader of a fetched checkpoint's weights, or of their average. Raises ConfigError for an unknown format."""
    if checkpoint_format not in READERS:
        raise ConfigError(
            f"the checkpoint's format is {checkpoint_format!r}",
            expected=f"one of {', '.join(READERS)}",
            fix="export it with the version of vlmpipe that trained it",
        )
    return READERS[checkpoint_format](folder, averaged=averaged)
