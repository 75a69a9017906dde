"""Reads trained weights of each checkpoint format one tensor at a time, without a process group.

Reads pickles: the commit protocol must have verified the files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.strategies.deepspeed.engine import EMA_FILE, MODULE_FILE, PARTITION_FILE, SHAPES_FILE
from vlmpipe.trainer.strategies.torch_base import EMA

MODULE_PREFIX = "model."  # the training module holds the Hugging Face model under this name


@dataclass(frozen=True)
class WeightReader:
    """Weights by the names of the Hugging Face model's state dict."""

    names: Set[str]
    read: Callable[[str], Tensor]


class _OneMetadata(dcp.FileSystemReader):
    """Caches the metadata, which every `dcp.load` reads in full."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = super().read_metadata()

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        return self._metadata


def _dcp_weights(folder: Path, *, averaged: bool) -> WeightReader:
    """Torch's distributed checkpoint format, of DDP, FSDP and the model-parallel strategies."""
    reader, prefix = _OneMetadata(folder), f"{EMA if averaged else 'model'}.{MODULE_PREFIX}"
    entries = {
        key.removeprefix(prefix): entry
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }

    def read(name: str) -> Tensor:
        tensor = torch.empty(entries[name].size, dtype=entries[name].properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # by no_dist
            dcp.load({prefix + name: tensor}, storage_reader=reader, no_dist=True)
        return tensor

    return WeightReader(entries.keys(), read)


def _deepspeed_weights(folder: Path, *, averaged: bool) -> WeightReader:
    if (folder / SHAPES_FILE).exists():
        return _zero3_weights(folder, averaged=averaged)
    return _zero2_weights(folder, averaged=averaged)


def _zero3_weights(folder: Path, *, averaged: bool) -> WeightReader:
    """ZeRO-3: each parameter is cut into equal slices, the last one padded; a rank's file concatenates its slices.

    Source: deepspeed/utils/zero_to_fp32.py.
    """
    saved = _mapped(folder / SHAPES_FILE)
    ranks = int(saved["dp_world_size"])
    flat = _averages(folder, ranks) if averaged else _masters(folder, ranks, "fp32_flat_groups")  # by rank and group

    def slice_of(shape: torch.Size) -> int:
        return -(-shape.numel() // ranks)

    places = _places(saved, slice_of)

    def read(name: str) -> Tensor:
        group, offset, shape = places[name]
        slices = [groups[group].detach().narrow(0, offset, slice_of(shape)) for groups in flat]
        return torch.cat(slices)[: shape.numel()].view(shape)

    return WeightReader(places.keys(), read)


def _zero2_weights(folder: Path, *, averaged: bool) -> WeightReader:
    """ZeRO-1 and 2: a group's concatenated parameters, partitioned over ranks. Source as above.

    Of the optimizer's weights, or their averages: the module's own, which precision bf16 rounds, are not read.
    """
    saved = _mapped(folder / MODULE_FILE)
    ranks = int(saved["dp_world_size"])
    masters = "single_partition_of_fp32_groups"
    flat = _averages(folder, ranks) if averaged else _masters(folder, ranks, masters)  # by rank and group
    places = _places(saved, lambda shape: shape.numel())

    def read(name: str) -> Tensor:
        group, start, shape = places[name]
        end, found = start + shape.numel(), []
        for partition in (groups[group].detach() for groups in flat):
            found.append(partition[max(0, start) : max(0, end)])
            start, end = start - len(partition), end - len(partition)
        return torch.cat(found).view(shape)

    return WeightReader(places.keys(), read)


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


def _masters(folder: Path, ranks: int, name: str) -> list[list[Tensor]]:
    """The optimizer's fp32 weights by rank and group. Files that DeepSpeed's bf16 engine wrote have a prefix."""
    files = [folder / PARTITION_FILE.format(rank=rank) for rank in range(ranks)]
    if not files[0].exists():
        files = [file.with_name(f"bf16_{file.name}") for file in files]
    return [_mapped(file)["optimizer_state_dict"][name] for file in files]


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


def _mapped(file: Path) -> dict[str, Any]:
    """A file of DeepSpeed, with memory-mapped tensors and without its own objects."""
    with torch.serialization.safe_globals([(_Ignored, name) for name in DEEPSPEED_OBJECTS]):
        return dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))


READERS: dict[str, Callable[..., WeightReader]] = {"dcp": _dcp_weights, "deepspeed": _deepspeed_weights}


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
