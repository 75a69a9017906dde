"""The weights that a native model starts with, one at a time, under the names that the model has now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from trainer.model_config import ModelConfig, WeightsConfig
from trainer.models.pretrained import WeightFiles, load_pretrained, with_rows

EMBEDDING, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
# How files name parts of the model: the hub's first releases lack a level that transformers has put in since.
OLDER = {"model.visual.": "visual.", "model.language_model.": "model."}


class StoredWeights:
    """Pretrained weights in fp32, with a row of embedding and head for each of `num_tokens` tokens.

    Read from safetensors files where these hold a name that is known; a model in another form is loaded whole, and held
    until this object goes.
    """

    def __init__(self, part: WeightsConfig, model_class: Any, num_tokens: int) -> None:
        self._part, self._class, self._num_tokens, self._files = part, model_class, num_tokens, WeightFiles(part)

    def read(self, name: str) -> Tensor:
        tensor = self._find(name)
        return with_rows(tensor, self._num_tokens) if name in (EMBEDDING, HEAD) else tensor

    def _find(self, name: str) -> Tensor:
        for known in (name, *(name.replace(new, old, 1) for new, old in OLDER.items() if name.startswith(new))):
            if known in self._files:
                return self._files.read(known)
        if name == HEAD and any(known in self._files for known in (EMBEDDING, "model.embed_tokens.weight")):
            return self._find(EMBEDDING)  # a tied head is not stored
        return self._whole[name]

    @cached_property
    def _whole(self) -> dict[str, Tensor]:
        return dict(load_pretrained(self._class, self._part).state_dict())


class InitialWeights:
    """See `trainer.models.family.Weights`. Equal to what `build` puts there.

    Weights that are drawn at random depend on all those drawn before them, so for these the model is built once.
    """

    def __init__(
        self, config: ModelConfig, model_class: Any, num_tokens: int, draw: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        self._draw = draw
        self._stored = StoredWeights(config.tower, model_class, num_tokens) if config.tower.weights else None

    def read(self, name: str) -> Tensor:
        return self._stored.read(name) if self._stored else self._drawn[name]

    @cached_property
    def _drawn(self) -> Mapping[str, Tensor]:
        return self._draw()
