"""What ranks of a context group compute of a micro-batch, and which models they can share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.trainer.flop_cases import model_config
from tests.support.trainer.native_sequences import config_of
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention.context_parallel import ContextParallel
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.strategies.context_parallel import inputs_of_rank, require_context_parallel
from vlmpipe.trainer.strategies.tensor_parallel.plan import require_shardable

ROWS, TOKENS, HIDDEN = 2, 8, 4


def inputs() -> dict[str, Any]:
    return {
        "inputs_embeds": torch.randn(ROWS, TOKENS, HIDDEN),
        "position_ids": torch.arange(4 * ROWS * TOKENS).view(4, ROWS, TOKENS),
        "samples": CuSeqlens.of([[5, 3], [8]], TOKENS),
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_are_all_tokens_once_in_order(ranks: int) -> None:
    given = inputs()
    parts = [inputs_of_rank(given, ContextParallel(ranks, number)) for number in range(ranks)]
    for name in ("inputs_embeds", "position_ids"):
        dims = (0, 1) if name == "inputs_embeds" else (1, 2)
        assert torch.equal(
            torch.cat([part[name].flatten(*dims) for part in parts], dims[0]), given[name].flatten(*dims)
        )
    assert all(part["inputs_embeds"].shape[:2] == part["position_ids"].shape[1:] for part in parts)
    own = parts[0]["inputs_embeds"]
    assert own.untyped_storage().nbytes() == own.nbytes, "the embeddings of all tokens would live on"


@pytest.mark.parametrize("as_mask", [False, True])
def test_levels_of_images_are_added_at_the_tokens_of_each_rank(*, as_mask: bool) -> None:
    """At borders of parts too, and where a rank has none of them. The library's own forward pass gives a mask."""
    places, level = torch.tensor([0, 3, 4, 7, 8]), torch.randn(5, HIDDEN)
    mask = torch.zeros(ROWS * TOKENS, dtype=torch.bool).index_fill(0, places, value=True).view(ROWS, TOKENS)
    given = inputs() | {"visual_pos_masks": mask if as_mask else places, "deepstack_visual_embeds": [level]}
    expected = torch.zeros(ROWS * TOKENS, HIDDEN).index_put((places,), level, accumulate=True)
    added = []
    for number in range(4):
        part = inputs_of_rank(given, ContextParallel(4, number))
        own = torch.zeros(part["inputs_embeds"].shape) if as_mask else torch.zeros(ROWS * TOKENS // 4, HIDDEN)
        (values,) = part["deepstack_visual_embeds"]
        added.append(own.index_put((part["visual_pos_masks"],), values, accumulate=True).view(-1, HIDDEN))
    assert torch.equal(torch.cat(added), expected)


def test_an_input_by_token_that_is_not_known_is_refused() -> None:
    """As Gemma 4's inputs of each layer: a rank's tokens would get those of others."""
    given = inputs() | {"per_layer_inputs": torch.randn(ROWS, TOKENS, 2, HIDDEN)}
    with pytest.raises(ConfigError, match="takes per_layer_inputs for each token"):
        inputs_of_rank(given, ContextParallel(2, 0))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_degrees_that_divide_the_heads_are_accepted(family: str) -> None:
    """Four heads, and two of keys and values."""
    for ranks in (2, 4):
        require_context_parallel(config_of(family), ranks)
    with pytest.raises(ConfigError, match="does not divide the language model's 4 attention heads") as caught:
        require_context_parallel(config_of(family), 3)
    assert "one of 1, 2, 4" in caught.value.text()


LAYERS = ["full_attention", "linear_attention"]
RULE = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}


@pytest.mark.parametrize("order", [1, -1])
def test_layers_that_are_no_attention_are_refused_wherever_they_lie(order: int) -> None:
    config = model_config()
    hybrid = config.language_model.config | RULE | {"model_type": "qwen3_5_text", "layer_types": LAYERS[::order]}
    hybrid["num_hidden_layers"] = len(LAYERS)
    changed = config.model_copy(update={"language_model": config.language_model.model_copy(update={"config": hybrid})})
    with pytest.raises(ConfigError, match="Qwen3_5TextModel has layers that are no attention"):
        require_context_parallel(changed, 2)
    with pytest.raises(ConfigError, match=r"tensor parallelism cannot split 'linear_attn\.in_proj_qkv'"):
        require_shardable(changed, 2, cached=False)


def test_attention_that_cannot_be_shared_is_refused() -> None:
    config = model_config()
    assert family_of(config) and config.language_model.config
    dropout = config.language_model.config | {"attention_dropout": 0.1}
    changed = config.model_copy(update={"language_model": config.language_model.model_copy(update={"config": dropout})})
    require_context_parallel(config, 2)
    with pytest.raises(ConfigError, match=r"train\.context_parallel 2: Qwen2Model has attention that is not plainly"):
        require_context_parallel(changed, 2)
