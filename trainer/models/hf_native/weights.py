"""Initial weights of transformers models, one tensor at a time, under the names of the current release."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from trainer.config.model import WeightsConfig
from trainer.models.hf_native.pretrained import load_pretrained

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class PretrainedModel:
    """A transformers model and the names of its weights."""

    kind: Any  # transformers' class
    embedding: str  # name of the embedding's weight
    tower: str = ""  # prefix of the vision encoder's weights
    older: Mapping[str, str] = field(default_factory=dict)  # name prefixes -> those in files of older releases


class StoredWeights:
    """Pretrained weights in fp32, with at least `num_tokens` rows of embedding and head.

    Read from safetensors files that hold a known name; a model in another form is loaded whole and held in memory for
    as long as this object lives.
    """

    def __init__(self, part: WeightsConfig, model: PretrainedModel, num_tokens: int) -> None:
        self._part, self._model, self._num_tokens = part, model, num_tokens

    def read(self, name: str) -> Tensor:
        tensor = self._find(name)
        return _with_rows(tensor, self._num_tokens) if name in (self._model.embedding, HEAD) else tensor

    def _find(self, name: str) -> Tensor:
        for known in self._names(name):
            if known in self._files:
                with safe_open(self._files[known], framework="pt") as file:
                    tensor = file.get_tensor(known)
                return tensor.float() if tensor.is_floating_point() else tensor
        if name == HEAD and any(known in self._files for known in self._names(self._model.embedding)):
            return self._find(self._model.embedding)  # files leave out a tied head
        return self._whole[name]

    def _names(self, name: str) -> list[str]:
        """The names that a weight may have in files."""
        older = self._model.older.items()
        return [name, *(name.replace(new, old, 1) for new, old in older if name.startswith(new))]

    @cached_property
    def _whole(self) -> dict[str, Tensor]:
        return dict(load_pretrained(self._model.kind, self._part).state_dict())

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Tensor -> safetensors file; empty where the weights are stored in another form."""
        if single := self._file(SAFE_WEIGHTS_NAME):
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        if index := self._file(SAFE_WEIGHTS_INDEX_NAME):
            weight_map = json.loads(index.read_text())["weight_map"]
            found = {file: self._file(file) for file in set(weight_map.values())}
            return {key: path for key, file in weight_map.items() if (path := found[file])}
        return {}

    def _file(self, name: str) -> Path | None:
        path = cached_file(
            self._part.weights,
            name,
            revision=self._part.revision or None,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return Path(path) if path else None


class DrawnWeights:
    """Random weights. Each depends on all drawn before it, so the first `read` builds the model and keeps it."""

    def __init__(self, draw: Callable[[], Mapping[str, Tensor]]) -> None:
        self._draw = draw

    def read(self, name: str) -> Tensor:
        return self._drawn[name]

    @cached_property
    def _drawn(self) -> Mapping[str, Tensor]:
        return self._draw()


def _with_rows(weight: Tensor, count: int) -> Tensor:
    """`weight` with rows for the tokenizer's additional tokens: the mean of all rows.

    Computed in double precision, so that the result does not depend on the number of threads.
    """
    missing = count - len(weight)
    if missing <= 0:
        return weight
    mean = weight.double().mean(dim=0, keepdim=True).to(weight.dtype)
    return torch.cat([weight, mean.expand(missing, -1)])
