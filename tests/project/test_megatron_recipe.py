"""recipes/megatron's shards of weights, without Megatron-core: nothing is lost, and heads stay together."""

from __future__ import annotations

import importlib.util
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.support.paths import ROOT

TEXT = SimpleNamespace(
    num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, hidden_size=32, head_dim=4, intermediate_size=24
)
VOCABULARY = 40


@pytest.fixture(scope="module")
def weights() -> ModuleType:
    spec = importlib.util.spec_from_file_location("megatron_weights", ROOT / "recipes/megatron/weights.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def whole(*, tied: bool) -> dict[str, torch.Tensor]:
    width, queries, keys = TEXT.hidden_size, TEXT.num_attention_heads * 4, TEXT.num_key_value_heads * 4
    shapes = {
        "model.language_model.embed_tokens.weight": (VOCABULARY, width),
        "model.language_model.norm.weight": (width,),
    }
    shapes |= {} if tied else {"lm_head.weight": (VOCABULARY, width)}
    for layer in range(TEXT.num_hidden_layers):
        before = f"model.language_model.layers.{layer}."
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{before}self_attn.{part}_proj.weight"] = (rows, width)
            shapes[f"{before}self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{before}self_attn.o_proj.weight"] = (width, queries)
        for half in ("gate", "up"):
            shapes[f"{before}mlp.{half}_proj.weight"] = (TEXT.intermediate_size, width)
        shapes[f"{before}mlp.down_proj.weight"] = (width, TEXT.intermediate_size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{before}{norm}.weight"] = (width,)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_shards_joined_are_what_was_sharded(weights: ModuleType, count: int, tied: bool) -> None:
    before = whole(tied=tied)
    shards = [weights.shard(before, TEXT, tied, count, rank) for rank in range(count)]
    after = weights.join(shards, TEXT, tied)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    split = {name for name, tensor in shards[0].items() if count > 1 and "layernorm" not in name}
    in_all = sum(tensor.numel() for one in shards for name, tensor in one.items() if name in split)
    assert in_all == sum(one.numel() for name, one in before.items() if "norm" not in name) * (count > 1)


def test_a_shard_holds_whole_groups_of_heads(weights: ModuleType) -> None:
    """Query heads 4 to 7, and key and value heads 2 and 3, belong to the second of two processes."""
    before = whole(tied=False)
    mine = weights.shard(before, TEXT, False, 2, 1)["decoder.layers.0.self_attention.linear_qkv.bias"]
    q, k, v = (before[f"model.language_model.layers.0.self_attn.{part}_proj.bias"].view(-1, 4) for part in "qkv")
    assert torch.equal(mine, torch.cat([q[4], q[5], k[2], v[2], q[6], q[7], k[3], v[3]]))
