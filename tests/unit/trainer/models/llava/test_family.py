"""A language model that lets samples of one sequence see each other is refused before it trains on them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.support.trainer.tiny_runs import TINY
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.llava.family import LlavaFamily

CONVOLUTION = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
MAMBA = {
    "model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_d_state": 8, "num_local_experts": 0,
}  # fmt: skip


def config_of(language_model: dict[str, Any]) -> ModelConfig:
    section = copy.deepcopy(TINY["model"])
    section["language_model"]["config"] |= language_model
    return ModelConfig.model_validate(section)


@pytest.mark.parametrize(
    "language_model", [{}, {"model_type": "gemma3_text"}, CONVOLUTION], ids=lambda one: str(one)[:30]
)
def test_attention_and_known_mixers_pass(language_model: dict[str, Any]) -> None:
    LlavaFamily().require_trainable(config_of(language_model), pack=True, cached=True)


def test_a_mixer_that_is_not_known_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="granitemoehybrid model lets samples in one sequence see each other"
    ) as raised:
        LlavaFamily().require_trainable(config_of(MAMBA), pack=True, cached=True)
    assert raised.value.fix == "set data.pack to false"
