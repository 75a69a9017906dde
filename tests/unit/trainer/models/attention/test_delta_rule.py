"""The gated delta rule of a mixer, and what it keeps for the backward pass."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from vlmpipe.trainer.models.attention.delta_rule import DeltaRule, RuleSizes, rule_of, saved_bytes_per_token

SIZES = RuleSizes(key_heads=1, value_heads=2, key_width=16, value_width=16)
CPU = torch.device("cpu")
TORCHS = inspect.unwrap(qwen.torch_chunk_gated_delta_rule)


def mixer() -> nn.Module:
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    widths = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    return qwen.Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(hidden_size=16, **heads, **widths), 0)


def test_the_rule_of_a_mixer_is_found_with_torchs_own() -> None:
    rule = rule_of(mixer())
    assert rule is not None and rule.sizes == SIZES
    assert rule.kernel is qwen.torch_chunk_gated_delta_rule and rule.reference is TORCHS
    assert rule_of(nn.Linear(2, 2)) is None


def test_bytes_that_torchs_rule_keeps_are_counted_from_shapes() -> None:
    """At the widths of Qwen3.5 9B. The count is that of a pass with numbers."""
    small = DeltaRule(TORCHS, TORCHS, SIZES)
    assert small.reference_bytes_per_token() == saved_bytes_per_token(TORCHS, SIZES, CPU)
    published = DeltaRule(TORCHS, TORCHS, RuleSizes(16, 32, 128, 128))
    assert published.reference_bytes_per_token() == pytest.approx(254_738, rel=0.01)
    assert published.sizes.kernel_bytes_per_token() == 2 * 16 * 260 + 32 * (193 * 2 + 4)
