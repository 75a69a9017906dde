"""AdamW's moments of a checkpoint, by the names of the parameters they belong to."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from vlmpipe.trainer.checkpoint.export.weight_reader import MODULE_PREFIX

STATE = "optimizer.state."


@dataclass(frozen=True)
class Moments:
    """Running averages of a parameter's clipped gradients and of their squares, both of the parameter's shape."""

    first: Tensor
    second: Tensor


def read_moments(folder: Path) -> dict[str, Moments]:
    """The moments of a fetched checkpoint, on the CPU."""
    first, second = (_moment(folder, moment) for moment in ("exp_avg", "exp_avg_sq"))
    assert first.keys() == second.keys() and first, f"no moments in {folder}"
    return {name: Moments(tensor, second[name]) for name, tensor in first.items()}


def _moment(folder: Path, moment: str) -> dict[str, Tensor]:
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
