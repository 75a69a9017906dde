"""Initial weights of a native model, one tensor at a time, under the names of the current transformers release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from trainer.config.model import ModelConfig, WeightsConfig
from trainer.models.hf_native.pretrained import WeightFiles, load_pretrained, with_rows

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class PretrainedModel:
    """A native model of transformers, as far as its weights are concerned."""

    kind: Any  # transformers' class
    tower: str  # what the names of the vision encoder's weights begin with
    embedding: str  # the name of the embedding's weight
    older: Mapping[str, str] = field(default_factory=dict)  # beginnings of names -> those in files of older releases


class StoredWeights:
    """Pretrained weights in fp32, with a row of embedding and head for each of `num_tokens` tokens.

    Read from safetensors files where these hold a name that is known; a model in another form is loaded whole, and held
    until this object goes.
    """

    def __init__(self, part: WeightsConfig, model: PretrainedModel, num_tokens: int) -> None:
        self._part, self._model, self._num_tokens, self._files = part, model, num_tokens, WeightFiles(part)

    def read(self, name: str) -> Tensor:
        tensor = self._find(name)
        return with_rows(tensor, self._num_tokens) if name in (self._model.embedding, HEAD) else tensor

    def _find(self, name: str) -> Tensor:
        for known in self._names(name):
            if known in self._files:
                return self._files.read(known)
        if name == HEAD and any(known in self._files for known in self._names(self._model.embedding)):
            return self._find(self._model.embedding)  # a tied head is not stored
        return self._whole[name]

    def _names(self, name: str) -> list[str]:
        """What files may call a weight."""
        older = self._model.older.items()
        return [name, *(name.replace(new, old, 1) for new, old in older if name.startswith(new))]

    @cached_property
    def _whole(self) -> dict[str, Tensor]:
        return dict(load_pretrained(self._model.kind, self._part).state_dict())


class InitialWeights:
    """See `trainer.models.base.Weights`. Equal to what `build` puts there.

    Weights that are drawn at random depend on all those drawn before them, so for these the model is built once.
    """

    def __init__(
        self, config: ModelConfig, model: PretrainedModel, num_tokens: int, draw: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        self._draw = draw
        self._stored = StoredWeights(config.tower, model, num_tokens) if config.tower.weights else None

    def read(self, name: str) -> Tensor:
        return self._stored.read(name) if self._stored else self._drawn[name]

    @cached_property
    def _drawn(self) -> Mapping[str, Tensor]:
        return self._draw()
