"""Tokens that the model has not learned are not trained in vain: their rows are trained, or the run is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.trainer.chat_templates import PLAIN, with_template
from tests.support.trainer.flop_cases import CLIP
from vlmpipe.planner.model_architecture import _require_trained_tokens
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.chat.added_tokens import added_tokens, require_trained_tokens, trained_tokens
from vlmpipe.trainer.data.tokenize import pretrained_tokenizer
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.registry import family_of

NEW = ["<act_1>", "<act_2>"]
ROWS = ["model.language_model.embed_tokens.weight", "lm_head.weight"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with its tokenizer and spare rows, the same tokenizer with further tokens, and one with far more."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = with_template(PLAIN.replace("<|image_pad|>", "<image>"), image="<image>")
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer) + 4, num_key_value_heads=1, tie_word_embeddings=False, **settings)
    Qwen2ForCausalLM(config).save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    tokenizer.add_tokens(NEW)
    tokenizer.save_pretrained(root / "more")
    tokenizer.add_tokens([f"<far_{n}>" for n in range(8)])
    tokenizer.save_pretrained(root / "far")
    return {name: root / name for name in ("base", "more", "far")}


def model_of(folders: dict[str, Path], tokenizer: str = "more", **more: Any) -> ModelConfig:
    parts = {"tower": {"config": CLIP}, "language_model": {"weights": str(folders["base"])}, "image_size": 16}
    return ModelConfig.model_validate({**parts, "tokenizer": str(folders[tokenizer]), **more})


def skeleton(config: ModelConfig, tokenizer: Any) -> nn.Module:
    with torch.device("meta"):
        return family_of(config).skeleton(config, vocabulary=len(tokenizer))


def require(config: ModelConfig) -> None:
    """As training does, and as planning does."""
    tokenizer = pretrained_tokenizer(config.tokenizer)
    _require_trained_tokens(config)
    require_trained_tokens(skeleton(config, tokenizer), config, tokenizer)


@pytest.mark.parametrize("more", [{"lora": {"rank": 2}}, {"freeze": ["tower", "language_model"]}])
def test_new_tokens_with_frozen_rows_are_refused_and_the_remedy_trains_them(
    folders: dict[str, Path], more: dict[str, Any]
) -> None:
    for planned in (True, False):
        config = model_of(folders, **more)
        tokenizer = pretrained_tokenizer(config.tokenizer)
        with pytest.raises(ConfigError, match="has 2 tokens that the pretrained model has not learned") as refused:
            if planned:
                _require_trained_tokens(config)
            else:
                require_trained_tokens(skeleton(config, tokenizer), config, tokenizer)
        whole = f"model.train_parameters: [{', '.join(ROWS)}]"
        rows = f"set model.lora.train_tokens: added, or {whole} for all rows"
        assert refused.value.fix == (rows if "lora" in more else f"set {whole}")
    require(model_of(folders, **more, train_parameters=ROWS))
    require(model_of(folders, "base", **more))
    require(model_of(folders))


def test_rows_beyond_the_embedding_and_tokens_of_another_tokenizer_are_new(folders: dict[str, Path]) -> None:
    config = model_of(folders, "far")
    tokenizer = pretrained_tokenizer(config.tokenizer)
    assert added_tokens(config, tokenizer) == sorted([*NEW, *(f"<far_{n}>" for n in range(8))])
    grown = model_of(folders, "base")  # tokens were added to the folder of the model itself
    assert added_tokens(grown, tokenizer) == [f"<far_{n}>" for n in range(2, 8)]
    assert added_tokens(model_of(folders, "base"), pretrained_tokenizer(str(folders["base"]))) == []


def test_rows_of_added_tokens_are_trained_beside_adapters(folders: dict[str, Path]) -> None:
    tokenizer = pretrained_tokenizer(str(folders["more"]))
    expected = sorted(tokenizer.convert_tokens_to_ids(NEW))
    for wanted in ("added", NEW, [*NEW, *NEW]):
        config = model_of(folders, lora={"rank": 2, "train_tokens": wanted})
        require(config)
        assert trained_tokens(config, tokenizer) == expected
        trained = {name for name, weight in skeleton(config, tokenizer).named_parameters() if weight.requires_grad}
        assert {name for name in trained if ".lora_" not in name and "projector" not in name} == set(ROWS)
    assert trained_tokens(model_of(folders, lora={"rank": 2}), tokenizer) == []


@pytest.mark.parametrize(
    ("tokenizer", "wanted", "said", "fix"),
    [
        ("base", "added", "adds no token to those of the pretrained model", "or name the tokens"),
        ("more", ["<act_3>"], "has '<act_3>', which model.tokenizer", "correct the name"),
        (
            "more",
            NEW[:1],
            r"has 1 tokens .* \('<act_2>'\).* does not name them",
            "set model.lora.train_tokens: added, or",
        ),
    ],
)
def test_tokens_that_cannot_be_trained_or_are_left_out_are_refused(
    folders: dict[str, Path], tokenizer: str, wanted: Any, said: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        require(model_of(folders, tokenizer, lora={"rank": 2, "train_tokens": wanted}))
    assert fix in (refused.value.fix or "")


def test_an_adapter_with_rows_that_its_base_lacks_is_refused(folders: dict[str, Path]) -> None:
    config = model_of(folders, "far", lora={"rank": 2, "train_tokens": "added", "export": "adapter"})
    with pytest.raises(ConfigError, match=r"beyond the \d+ rows of the base's embedding") as refused:
        require(config)
    assert refused.value.fix == "set model.lora.export to merged"
