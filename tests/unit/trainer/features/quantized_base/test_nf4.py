"""4-bit linear layers: products, gradients, size, and which layers of a model become one."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.short_form import WHOLE
from tests.support.trainer.flop_cases import model_config
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.features.quantized_base.nf4 import (
    Nf4Linear,
    QuantizedWeights,
    quantize_base,
    quantized_names,
    require_bitsandbytes,
)
from vlmpipe.trainer.models.layers.freeze import is_adapter
from vlmpipe.trainer.models.llava.family import LlavaFamily


def layer(inputs: int = 96, outputs: int = 130, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


@pytest.mark.slow
@example(inputs=1, outputs=2, bias=False, dtype=torch.float32)
@given(
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=30 if WHOLE else 1, deadline=None)  # bitsandbytes compiles for each shape
def test_output_and_gradient_are_those_of_the_dequantized_weight(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype
) -> None:
    linear = layer(inputs, outputs, bias=bias)
    quantized, plain = Nf4Linear(linear), layer(inputs, outputs, bias=False).to(dtype)
    plain.weight.data = quantized.dequantized(dtype)
    results = []
    for module in (quantized, plain):
        hidden = torch.rand(2, 3, inputs, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        output = module(hidden)
        if bias and module is plain:
            output = output + linear.bias.to(dtype)
        output.sum().backward()
        results.append((output, hidden.grad))
    assert all(torch.equal(found, expected) for found, expected in zip(*results, strict=True))


def test_a_weight_keeps_nine_tenths_and_takes_half_a_byte_a_number() -> None:
    linear = layer(512, 512)
    quantized = Nf4Linear(linear)
    error = (quantized.dequantized(torch.float32) - linear.weight).norm() / linear.weight.norm()
    assert 0.05 < error < 0.1
    held = sum(buffer.nbytes for buffer in (quantized.packed, quantized.scales, quantized.scale_scales))
    assert held / linear.weight.numel() == pytest.approx(0.516, abs=0.001)


def test_casting_the_module_leaves_the_weight_as_it_is() -> None:
    quantized = Nf4Linear(layer())
    before = quantized.dequantized(torch.float32)
    assert torch.equal(quantized.to(torch.bfloat16).dequantized(torch.float32), before)
    assert quantized.bias is not None and quantized.bias.dtype == torch.bfloat16


def test_frozen_layers_of_the_language_blocks_are_quantized_and_nothing_else() -> None:
    config = model_config(lora={"rank": 4, "targets": ("q_proj",), "quantize_base": "nf4"})
    model = LlavaFamily().skeleton(config, vocabulary=300).float()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    names = quantized_names(model)
    quantize_base(model)
    found = {name for name, module in model.named_modules() if isinstance(module, Nf4Linear)}
    assert {f"{name.replace('.base_layer', '')}.weight" for name in found} == names
    assert len(names) == 7 * len(model.get_decoder().layers), "the linear layers of each block, adapted or not"
    assert not any(isinstance(module, Nf4Linear) for module in (model.lm_head, *model.model.vision_tower.modules()))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert any(is_adapter(name) for name in model.state_dict())
    assert quantized_names(model) == set(), "each once"


def test_initial_weights_are_read_as_training_sees_them() -> None:
    weights = {"a.weight": layer().weight, "b.weight": layer(8, 8).weight}

    class Stored:
        def read(self, name: str) -> torch.Tensor:
            return weights[name]

    read = QuantizedWeights(Stored(), {"a.weight"}).read
    assert torch.equal(read("a.weight"), Nf4Linear(layer()).dequantized(torch.float32))
    assert torch.equal(read("b.weight"), weights["b.weight"])


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match="bitsandbytes") as caught:
        require_bitsandbytes()
    assert caught.value.code == ExitCode.UNAVAILABLE and "vlmpipe[qlora]" in str(caught.value)
