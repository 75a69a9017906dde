"""Selective checkpointing computes products once, with no call of Python for other operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from vlmpipe.trainer.models.layers import saved_products
from vlmpipe.trainer.models.layers.recompute_policy import recompute_layers
from vlmpipe.trainer.models.layers.saved_products import PRODUCTS, Forward, Recomputation, save_products

IDS = torch.arange(8)[None] % 7
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@torch.library.custom_op("vlmpipe_tests::two_products", mutates_args=())
def two_products(left: Tensor, right: Tensor) -> Tensor:
    return left @ right @ right


two_products.register_autograd(
    lambda ctx, gradient: (gradient @ ctx.right.T @ ctx.right.T, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "right", inputs[1]),
)


def language_model(*, selective: bool) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=7,
    )
    model: nn.Module = Qwen2ForCausalLM(config).train()
    if selective:
        recompute_layers(model, selective=True)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[type, Counter[Any]]:
    """Products that pass the kernels in front, by pass."""
    counts: dict[type, Counter[Any]] = {}
    for kind in (Forward, Recomputation):
        counts[kind], result_of = Counter(), kind.result_of

        def counted(self: Any, product: Any, *given: Any, result_of: Any = result_of, kind: Any = kind) -> Any:
            counts[kind][product] += 1
            return result_of(self, product, *given)

        monkeypatch.setattr(kind, "result_of", counted)
    return counts


def test_gradients_are_those_without_checkpointing_to_the_bit(calls: dict[type, Counter[Any]]) -> None:
    for ours, plain in zip(
        gradients(language_model(selective=True)), gradients(language_model(selective=False)), strict=True
    ):
        assert torch.equal(ours, plain)
    made, reused = calls[Forward], calls[Recomputation]
    assert made == {torch.ops.aten.mm.default: 8, torch.ops.aten.addmm.default: 6, FLASH: 2}
    assert reused == {
        torch.ops.aten.mm.default: 6,
        torch.ops.aten.addmm.default: 6,
        FLASH: 2,
    }  # all but each layer's last


def test_no_mode_calls_python_for_every_operation() -> None:
    model, depths = language_model(selective=True), []
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda *_: depths.append(torch._C._len_torch_dispatch_stack()))
    gradients(model)
    assert depths == [0] * 4  # two layers, two passes


def test_counters_see_each_product_once(calls: dict[type, Counter[Any]]) -> None:
    flops = {}
    for selective in (True, False):
        model = language_model(selective=selective)
        with FlopCounterMode(display=False) as counter:
            gradients(model)
        flops[selective] = counter.get_total_flops()
    assert flops[True] == flops[False] > 0
    assert not calls[Forward]


def test_a_product_of_products_is_saved_whole(monkeypatch: pytest.MonkeyPatch, calls: dict[type, Counter[Any]]) -> None:
    operation = torch.ops.vlmpipe_tests.two_products.default
    monkeypatch.setattr(saved_products, "PRODUCTS", [*PRODUCTS, operation])
    left, right = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)

    def layer(rows: Tensor) -> Tensor:
        return two_products(rows, right).sin().exp()

    checkpoint(layer, left, use_reentrant=False, context_fn=save_products).sum().backward()
    expected = torch.autograd.grad((left @ right @ right).sin().exp().sum(), left)[0]
    torch.testing.assert_close(left.grad, expected)
    assert calls == {Forward: {operation: 1}, Recomputation: {operation: 1}}


def run(layer: Callable[[Tensor], Tensor], *, twice: bool = False) -> None:
    rows = torch.randn(4, 4, requires_grad=True)
    output = checkpoint(layer, rows, use_reentrant=False, context_fn=save_products).sum()
    for _ in range(1 + twice):
        output.backward(retain_graph=twice)


def test_results_that_changed_in_place_are_refused() -> None:
    with pytest.raises(RuntimeError, match="changed in place"):
        run(lambda rows: (rows @ rows).add_(1).sin())


def test_a_second_backward_pass_is_refused() -> None:
    with pytest.raises(RuntimeError, match="one forward pass serves one backward pass"):
        run(lambda rows: (rows @ rows).sin(), twice=True)


def test_other_operations_in_the_recomputation_are_refused() -> None:
    passes = []

    def layer(rows: Tensor) -> Tensor:
        passes.append(rows)
        for _ in passes[1:]:
            rows.detach() @ rows.detach()
        return (rows @ rows).sin()

    with pytest.raises(RuntimeError, match=r"call 2 of aten\.mm\.default"):
        run(layer)


def test_products_outside_of_layers_pass() -> None:
    run(lambda rows: (rows @ rows).sin())
    rows = torch.randn(4, 4)
    assert torch.equal(rows @ torch.eye(4), rows)
