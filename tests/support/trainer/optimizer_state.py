"""AdamW's moments of a checkpoint, by the names of the parameters they belong to, from every checkpoint format."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from vlmpipe.trainer.checkpoint.export.weight_reader import MODULE_PREFIX, open_weights
from vlmpipe.trainer.checkpoint.verified_files import CheckpointFiles
from vlmpipe.trainer.storage.local import LocalStorage

STATE = "optimizer.state."
PARTITIONS = "zero/*_optim_states.pt"


@dataclass(frozen=True)
class Moments:
    """Running averages of a parameter's clipped gradients and of their squares, both of the parameter's shape."""

    first: Tensor
    second: Tensor


def read_moments(folder: Path, checkpoint_format: str, scratch: Path) -> dict[str, Moments]:
    """The moments of a fetched checkpoint, on the CPU. `scratch` is an empty folder to write to."""
    read = _deepspeed_moment if checkpoint_format == "deepspeed" else _dcp_moment
    first, second = (read(folder, moment, scratch) for moment in ("exp_avg", "exp_avg_sq"))
    assert first.keys() == second.keys() and first, f"no moments in {folder}"
    return {name: Moments(tensor, second[name]) for name, tensor in first.items()}


def _dcp_moment(folder: Path, moment: str, scratch: Path) -> dict[str, Tensor]:
    reader = dcp.FileSystemReader(folder)
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if key.startswith(STATE) and key.endswith(f".{moment}") and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # by no_dist
        dcp.load(dict(state), storage_reader=reader, no_dist=True)
    prefix = f"{STATE}{MODULE_PREFIX}"
    return {key.removeprefix(prefix).removesuffix(f".{moment}"): tensor for key, tensor in state.items()}


def _deepspeed_moment(folder: Path, moment: str, scratch: Path) -> dict[str, Tensor]:
    """DeepSpeed cuts moments as it cuts weights: read as weights, from a copy in which they stand in their place."""
    copy = scratch / moment
    shutil.copytree(folder, copy)
    for file in sorted(copy.glob(PARTITIONS)):
        saved = torch.load(file, map_location="cpu", weights_only=False)
        optimizer = saved["optimizer_state_dict"]
        stage_3 = "fp32_flat_groups" in optimizer
        weights = "fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"
        states: Mapping[int, Any] = optimizer["optimizer_state_dict" if stage_3 else "base_optimizer_state"]["state"]
        assert [tensor.shape for tensor in optimizer[weights]] == [states[n][moment].shape for n in sorted(states)]
        optimizer[weights] = [states[group][moment] for group in sorted(states)]
        torch.save(saved, file)
    weights_of_copy = open_weights(_Copied(copy), "deepspeed")
    return {name: weights_of_copy.read(name).clone() for name in weights_of_copy.names}


class _Copied(CheckpointFiles):
    """Files of a folder that no COMMIT vouches for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LocalStorage(folder), "", {})
        self._folder = folder

    @property
    def sizes_bytes(self) -> dict[str, int]:
        files = (path for path in self._folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self._folder)): path.stat().st_size for path in files}

    def read(self, file: str, start: int = 0, end: int | None = None) -> memoryview:
        return memoryview(bytearray((self._folder / file).read_bytes()[start:end]))

    def read_all(self, wanted: Sequence[tuple[str, int, int]]) -> Iterator[memoryview]:
        return (self.read(*piece) for piece in wanted)
