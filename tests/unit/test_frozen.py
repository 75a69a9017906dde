"""Which parameters patterns choose, and the sentences that refuse what cannot be."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from benchmarks.flop_cases import CLIP, LLAMA, QWEN2, model_config
from benchmarks.tiny_native import model_section
from trainer.errors import ConfigError
from trainer.model_config import ModelConfig
from trainer.models.frozen import described, frozen_weights, in_frozen_parts, part_of
from trainer.models.table import family_of

FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "smolvlm")
PARTS = ("tower", "projector", "language_model")
PATTERNS = ["*", "*layers.0.*", "*.embed_tokens.*", "*norm*", "*layers.[12].mlp*", "*.bias", "lm_head.*", "*vision*"]


def skeleton(config: ModelConfig) -> nn.Module:
    with torch.device("meta"):
        return family_of(config).skeleton(config, vocabulary=300)


def trained(config: ModelConfig) -> set[str]:
    return {name for name, parameter in skeleton(config).named_parameters() if parameter.requires_grad}


def of_family(family: str, **more: Any) -> ModelConfig:
    return model_config(**more) if family == "llava" else ModelConfig(**model_section(family, **more))


@settings(max_examples=25, deadline=None)
@given(
    parts=st.sets(st.sampled_from(PARTS)),
    freeze=st.lists(st.sampled_from(PATTERNS), max_size=3),
    train=st.lists(st.sampled_from(PATTERNS), max_size=2),
)
def test_parts_come_first_then_what_freezes_then_what_thaws(
    parts: set[str], freeze: list[str], train: list[str]
) -> None:
    chosen = {"freeze": tuple(sorted(parts)), "freeze_parameters": tuple(freeze), "train_parameters": tuple(train)}
    all_that_can_be = trained(model_config(freeze=()))
    for name in all_that_can_be:
        wanted = part_of(name) not in parts and not any(fnmatch.fnmatchcase(name, one) for one in freeze)
        wanted = wanted or any(fnmatch.fnmatchcase(name, one) for one in train)
        assert (name in trained(model_config(**chosen))) == wanted if False else True
    found = trained(model_config(**chosen))
    expected = {
        name
        for name in all_that_can_be
        if any(fnmatch.fnmatchcase(name, one) for one in train)
        or (part_of(name) not in parts and not any(fnmatch.fnmatchcase(name, one) for one in freeze))
    }
    assert found == expected
