"""Digests of weights: whether two models hold the same numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import changed_fields


class WeightsDigest:
    """SHA-256 over names, shapes, dtypes and bytes of weights that come one at a time, in name order."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._last = ""

    def add(self, name: str, tensor: Tensor) -> None:
        """The next weight."""
        assert name > self._last, f"{name} after {self._last}"
        self._last = name
        self._digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        self._digest.update(raw_bytes(tensor))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def weights_sha256(module: nn.Module) -> str:
    """SHA-256 over every weight of a module."""
    return tensors_sha256(sorted(module.state_dict().items()))


def tensors_sha256(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over tensors in name order, of which one is held at a time."""
    digest = WeightsDigest()
    for name, tensor in tensors:
        digest.add(name, tensor)
    return digest.hexdigest()


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 over shape, dtype and bytes of one weight."""
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def combined_sha256(digests: Mapping[str, str]) -> str:
    """Digest of weights by the digests of each, by name: processes can share the work, in any order."""
    return hashlib.sha256(json.dumps(dict(sorted(digests.items()))).encode()).hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row by row; without a copy where it lies so in the CPU's memory."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def model_sha256(job: JobConfig) -> str:
    """Digest of the model section: two runs with the same digest build the same model."""
    # Without what is null or no pattern: a field that a later version adds leaves older models' digests as they were.
    without: dict[str, Any] = {
        name: True
        for name in ("freeze_parameters", "train_parameters", "tokenizer_revision")
        if not getattr(job.model, name)
    }
    without["hub_token_secret"] = True  # gives access to weights, and does not decide them
    if lora := job.model.lora:
        added = ("use_rslora", "use_dora", "parts", "pretrained", "train_tokens")
        without["lora"] = {"export"} | {name for name in added if name not in changed_fields(lora)}
    section = job.model.model_dump(mode="json", exclude_none=True, exclude=without)
    return hashlib.sha256(json.dumps(section, sort_keys=True).encode()).hexdigest()
