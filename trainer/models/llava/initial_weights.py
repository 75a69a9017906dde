"""The weights that a `llava` model starts training with, one at a time: what is frozen is exported from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer.config.model import ModelConfig
from trainer.models.hf_native.pretrained import LanguageWeights

if TYPE_CHECKING:
    from trainer.models.llava.family import LlavaFamily

TOWER = "model.vision_tower."
LANGUAGE_MODEL = "model.language_model."
HEAD = "lm_head.weight"


class InitialWeights:
    """See `trainer.models.base.Weights`. Equal to what `build` puts there.

    The tower is held whole while it is read, a pretrained language model is not. Weights that are drawn at random
    depend on all those drawn before them, so for these the model is built once: only small models have frozen ones.
    """

    def __init__(self, family: LlavaFamily, config: ModelConfig, tokenizer: Any) -> None:
        self._family, self._config, self._tokenizer = family, config, tokenizer
        self._held: tuple[str, dict[str, Tensor]] = ("", {})
        self._language = LanguageWeights(config.language_model, len(tokenizer))

    def read(self, name: str) -> Tensor:
        if name.startswith(TOWER):
            return self._hold("tower")[name.removeprefix(TOWER)]
        if self._config.language_model.weights and (name == HEAD or name.startswith(LANGUAGE_MODEL)):
            return self._language.read("head" if name == HEAD else name.removeprefix(LANGUAGE_MODEL))
        return self._hold("drawn")[name]

    def _hold(self, part: str) -> dict[str, Tensor]:
        if self._held[0] != part:
            self._held = ("", {})  # let go of the other first
            tower = part == "tower"
            module = (
                self._family.build_tower(self._config) if tower else self._family.build(self._config, self._tokenizer)
            )
            self._held = (part, dict(module.state_dict()))
        return self._held[1]
