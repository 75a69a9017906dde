"""A kernel of gated delta rules that leaks, or whose gradients are wrong, is found before training.

No GPU runs here: torch's own code in other forms stands in for right kernels, and with faults for wrong ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.models.attention.delta_rule import DeltaRule, RuleSizes
from vlmpipe.trainer.preflight import delta_rules
from vlmpipe.trainer.preflight.delta_rules import faults_of, require_right_rules

SIZES = RuleSizes(key_heads=1, value_heads=2, key_width=16, value_width=16)
CPU = torch.device("cpu")
TORCHS = inspect.unwrap(qwen.torch_chunk_gated_delta_rule)
RECURRENT = inspect.unwrap(qwen.torch_recurrent_gated_delta_rule)
Rule = Callable[..., tuple[Tensor, Any]]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rules, "ROWS", (100, 70))


def recurrent(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **more: Any) -> Any:
    """The rule by another algorithm, a token at a time."""
    return RECURRENT(query, key, value, g=g, beta=beta, initial_state=None, output_final_state=False, **more)


def leaking(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **more: Any) -> Any:
    """Rows as one sequence: a state goes from each sample to the next."""
    flat = [one.flatten(0, 1)[None] for one in (query, key, value, g, beta)]
    output, _ = TORCHS(*flat[:3], g=flat[3], beta=flat[4], **more)
    return output.view_as(value), None


def looking_ahead(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **more: Any) -> Any:
    output, _ = TORCHS(query, key, value, g=g, beta=beta, **more)
    return output + 0.5 * output.roll(-1, 1), None


class Scaled(torch.autograd.Function):
    """A wrong backward pass behind a right forward pass."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return one.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


def wrong_gradient(name: str, factor: float) -> Rule:
    def rule(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **more: Any) -> Any:
        inputs = {"query": query, "key": key, "value": value, "decay": g, "beta": beta}
        inputs[name] = Scaled.apply(inputs[name], factor)
        decay, step = inputs.pop("decay"), inputs.pop("beta")
        return TORCHS(*inputs.values(), g=decay, beta=step, **more)

    return rule


def test_right_kernels_pass() -> None:
    assert faults_of(DeltaRule(TORCHS, TORCHS, SIZES), CPU) == []
    assert faults_of(DeltaRule(recurrent, TORCHS, SIZES), CPU) == []


@pytest.mark.parametrize(
    ("kernel", "sentence"),
    [
        (leaking, "the output of a sample changes with another sample"),
        (looking_ahead, "the output of a sample changes with what stands after it"),
        (wrong_gradient("decay", 0.9), "the gradient of decay differs from torch's own by 0.1 of its norm"),
        (wrong_gradient("beta", float("nan")), "the gradient of beta differs from torch's own by nan of its norm"),
        (wrong_gradient("key", 0.0), "the gradient of key differs from torch's own by 1 of its norm"),
    ],
)
def test_wrong_kernels_are_caught(kernel: Rule, sentence: str) -> None:
    faults = faults_of(DeltaRule(kernel, TORCHS, SIZES), CPU)
    assert any(fault.startswith(sentence) for fault in faults), faults


def mixer() -> nn.Module:
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    widths = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    return qwen.Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(hidden_size=16, **heads, **widths), 0)


def test_a_wrong_kernel_ends_with_a_code_of_its_own_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = wrong_gradient("decay", 0.5)
    monkeypatch.setattr(wrong, "__wrapped__", TORCHS, raising=False)
    monkeypatch.setattr(qwen, "torch_chunk_gated_delta_rule", wrong)
    monkeypatch.setattr(delta_rules, "has_kernel", lambda: True)
    with pytest.raises(UserError, match="the gradient of decay differs") as caught:
        require_right_rules(mixer(), CPU)
    assert caught.value.code == ExitCode.WRONG_KERNEL == 81
    assert f"torch {torch.__version__}" in caught.value.found and "flash-linear-attention" in caught.value.found


def test_a_right_kernel_is_named_with_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rules, "has_kernel", lambda: True)
    assert require_right_rules(mixer(), CPU).startswith("gated delta rules are the kernel of flash-linear-attention")
    assert require_right_rules(nn.Linear(2, 2), CPU) == ""
