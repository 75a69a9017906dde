"""Weights that a LLaVA starts from, read part by part."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.trainer.tiny_runs import TINY
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.models.hf_native import weights
from vlmpipe.trainer.models.hf_native.weight_files import WeightFiles, weight_files
from vlmpipe.trainer.models.llava.family import LlavaFamily


def test_the_language_models_files_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head has a prefix of its own: a second search may find another commit, or hold all weights twice."""
    section = copy.deepcopy(TINY["model"])
    text = Qwen2Config(**section["language_model"]["config"] | {"vocab_size": 310, "tie_word_embeddings": False})
    published = Qwen2ForCausalLM(text)
    published.save_pretrained(tmp_path)
    section["language_model"] = {"weights": str(tmp_path)}
    searches: list[str] = []

    def counted(part: WeightsConfig) -> WeightFiles:
        searches.append(part.weights)
        return weight_files(part)

    monkeypatch.setattr(weights, "weight_files", counted)
    tokenizer = make_tokenizer("train:300", ["USER: what digit is this? ASSISTANT:", " 7"])
    initial = LlavaFamily().initial_weights(ModelConfig.model_validate(section), tokenizer)
    assert initial.read("model.language_model.norm.weight").equal(published.model.norm.weight)
    assert initial.read("lm_head.weight").equal(published.lm_head.weight)
    assert searches == [str(tmp_path)]
