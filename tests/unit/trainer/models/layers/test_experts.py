"""Experts whose weights are computed for each pass: as PEFT computes them, and none saved for the backward pass."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vlmpipe.trainer.config.weights.lora import LoraConfig
from vlmpipe.trainer.models.layers import experts as module
from vlmpipe.trainer.models.layers.adapter_targets import Targets
from vlmpipe.trainer.models.layers.experts import compute_weights
from vlmpipe.trainer.models.layers.lora import ADAPTER, adapters_of, peft_settings

EXPERTS, WIDTH, INNER = 3, 8, 4


class Experts(nn.Module):
    """Of transformers' layout. `is_transposed`: (experts, in, out), as those of GPT-OSS."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        shapes = {"gate_up_proj": (EXPERTS, 2 * INNER, WIDTH), "down_proj": (EXPERTS, WIDTH, INNER)}
        for name, (count, rows, columns) in shapes.items():
            shape = (count, columns, rows) if is_transposed else (count, rows, columns)
            self.register_parameter(name, nn.Parameter(torch.randn(shape), requires_grad=False))

    def forward(self, hidden: Tensor) -> Tensor:
        """(tokens, width) through every expert."""
        for one in range(EXPERTS):
            up, down = self.gate_up_proj[one], self.down_proj[one]
            up, down = (up, down) if self.is_transposed else (up.T, down.T)
            gate, inner = (hidden @ up).chunk(2, dim=-1)
            hidden = hidden + (gate.sigmoid() * inner) @ down
        return hidden


class Model(nn.Module):
    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.experts = Experts(is_transposed=is_transposed)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.experts(hidden)
        return output


def adapted(*, is_transposed: bool) -> Any:
    """A model with adapters of PEFT on both weights, which change something."""
    import peft

    torch.manual_seed(0)
    model = Model(is_transposed=is_transposed)
    targets = Targets((), ("experts.gate_up_proj", "experts.down_proj"))
    peft.inject_adapter_in_model(peft_settings(LoraConfig(rank=2, alpha=3.0), targets), model, adapter_name=ADAPTER)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def passed(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients."""
    hidden = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    output = model(hidden)
    output.sin().sum().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return output.detach(), found


@pytest.mark.parametrize("is_transposed", [False, True])
def test_outputs_gradients_and_merged_weights_are_pefts(is_transposed: bool) -> None:
    model = adapted(is_transposed=is_transposed)
    expected, gradients = passed(model)
    assert len(gradients) == 4 and all(gradient.any() for gradient in gradients.values())
    source = {f"experts.{name}": weight for name, weight in model.experts.get_base_layer().named_parameters()}
    compute_weights(model.experts, model.experts.get_base_layer())
    found, ours = passed(model)
    assert torch.equal(found, expected) and ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient)
    merged = {name: one.merged(source[name], model.get_parameter) for name, one in adapters_of(model).items()}
    plain = model.experts.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    assert merged.keys() == source.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(plain.get_parameter(name.removeprefix("experts.")), weight)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_adapters_change_no_bit_before_they_are_trained(is_transposed: bool) -> None:
    model, hidden = adapted(is_transposed=is_transposed), torch.randn(5, WIDTH)
    experts = model.experts.get_base_layer()
    expected = Experts.forward(experts, hidden)
    compute_weights(model.experts, experts)
    assert not torch.equal(model(hidden), expected)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(parameter)
    assert torch.equal(model(hidden), expected)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_no_computed_weight_is_held_from_the_forward_to_the_backward_pass(
    is_checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all layers would take as much as the experts themselves, in full precision."""
    model, made, plain = adapted(is_transposed=False), list[weakref.ref[Any]](), module._weight
    compute_weights(model.experts, model.experts.get_base_layer())
    monkeypatch.setattr(module, "_weight", lambda *given: _Followed.apply(plain(*given), made))
    hidden = torch.randn(5, WIDTH)
    output = checkpoint(model, hidden, use_reentrant=False) if is_checkpointed else model(hidden)
    assert len(made) == 2 and not any(array() is not None for array in made)
    output.sum().backward()
    assert len(made) == 4, "each weight is computed once more"
    assert not any(array() is not None for array in made)


class _Followed(torch.autograd.Function):
    """A copy of a weight, whose memory is an array that is followed."""

    @staticmethod
    def forward(_ctx: Any, weight: Tensor, made: list[weakref.ref[Any]]) -> Tensor:
        array = weight.detach().numpy().copy()
        made.append(weakref.ref(array))
        return torch.from_numpy(array)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
