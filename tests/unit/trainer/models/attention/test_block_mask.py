"""The mask of packed rows is the library's own, for all models that take it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.masking_utils import create_causal_mask

from vlmpipe.trainer.models.attention.varlen import mask_of

TOKENS = 12
TINY: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 10}


def config_of(kind: Any, attention: str = "sdpa", **settings: Any) -> Any:
    config = kind(**TINY | settings)
    config._attn_implementation = attention
    return config


def positions(lengths: list[int]) -> torch.Tensor:
    """Of a row whose samples have these lengths; the rest is padding."""
    return torch.cat([torch.arange(length) for length in [*lengths, TOKENS]])[:TOKENS]


@given(rows=st.lists(st.lists(st.integers(1, TOKENS), max_size=4), min_size=1, max_size=3))
def test_the_mask_equals_transformers_for_packed_sequences(rows: list[list[int]]) -> None:
    position_ids = torch.stack([positions(lengths) for lengths in rows])
    config, hidden = config_of(LlamaConfig), torch.zeros(len(rows), TOKENS, 8)
    theirs = create_causal_mask(config, hidden, None, None, position_ids=position_ids)
    ours = mask_of(config, position_ids, packed=True)
    assert ours is not None and ours.dtype == torch.bool
    if theirs is None:  # no row is packed: what it stands for then
        theirs = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand_as(ours)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "config",
    [
        config_of(MistralConfig, sliding_window=4),
        config_of(Qwen2Config, use_sliding_window=True, sliding_window=4, max_window_layers=1),
        config_of(LlamaConfig, attention="eager"),
        config_of(LlamaConfig, attention="flash_attention_2"),
    ],
)
def test_other_kinds_of_attention_are_left_to_transformers(config: Any) -> None:
    assert mask_of(config, positions([5, 4])[None], packed=True) is None


@pytest.mark.parametrize("config", [config_of(kind) for kind in (LlamaConfig, Qwen2Config, Qwen3Config)])
def test_sequences_of_one_sample_have_no_mask(config: Any) -> None:
    assert mask_of(config, positions([])[None], packed=False) is None
    assert mask_of(config, positions([5, 4])[None], packed=True) is not None
