"""The loss of routers in a packed sequence is transformers' own on each sample, without padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.features.router_loss.balance import FEATURE
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.varlen import block_diagonal_mask, use_varlen_attention
from vlmpipe.trainer.models.layers.recompute_policy import recompute_layers
from vlmpipe.trainer.models.loss.chunked_loss import TokenLoss, loss_at_labels

LENGTHS, TOKENS, COEFFICIENT, LABELS = [5, 3], 12, 0.25, 4


def sparse_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 3, "vocab_size": 20, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads)).train()


def units_of(model: Any) -> Any:
    return SimpleNamespace(language_layers=list(model.layers), tower_layers=[])


def train(coefficient: float = COEFFICIENT) -> TrainConfig:
    content = {"router_loss": coefficient, "global_batch_size": 1, "optimizer": {"learning_rate": 1e-4}}
    return TrainConfig.model_validate(content)


def gradients_of(model: Any) -> dict[str, Tensor]:
    named = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return named


@pytest.mark.parametrize("checkpointing", [False, True])
def test_value_and_gradients_are_transformers_own_on_tokens_of_samples(checkpointing: bool) -> None:
    model, ids = sparse_model(), torch.arange(1, sum(LENGTHS) + 1)
    rows = [torch.nn.functional.pad(row, (0, TOKENS - len(row))) for row in ids.split(LENGTHS)]
    is_token = torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]
    theirs = model(input_ids=torch.stack(rows), attention_mask=is_token.long(), output_router_logits=True).aux_loss
    (COEFFICIENT * LABELS * theirs).backward()
    expected = gradients_of(model)

    use_varlen_attention(model.model)
    if checkpointing:
        recompute_layers(model.model, selective=False)
    loss = TokenLoss().train()
    units = units_of(model.model)
    assert "router loss x 0.25 on 3 routers" in FEATURE.change_layers(train(), units, ids.device)
    loss.added_loss = FEATURE.added_loss(train(), units)
    packed = torch.cat([ids, ids.new_zeros(TOKENS - len(ids))])[None]
    places = torch.cat([torch.arange(length) for length in (*LENGTHS, TOKENS - len(ids))])[None]
    samples = CuSeqlens.of([LENGTHS], TOKENS)

    def total() -> Tensor:
        apart = block_diagonal_mask(model.model.config, places, samples)
        hidden = model.model(input_ids=packed, position_ids=places, use_cache=False, **apart).last_hidden_state
        return loss_at_labels(loss, model.lm_head, hidden.detach(), torch.arange(LABELS), torch.arange(LABELS))

    found = total()
    loss.eval()
    model.eval()
    plain = total()
    loss.train()
    model.train()
    torch.testing.assert_close(found - plain, COEFFICIENT * LABELS * theirs.detach(), rtol=1e-5, atol=1e-6)
    total().backward()
    again = {name: gradient for name, gradient in gradients_of(model).items() if name in expected}
    assert any("gate" in name for name in expected) and again.keys() == expected.keys() - {"lm_head.weight"}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in again.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5 * largest, msg=name)


def test_a_batch_of_padding_alone_adds_nothing_and_no_nan() -> None:
    """As ranks compute whose share of an epoch's last step is empty; each has all gradients, or others would wait."""
    model = sparse_model()
    use_varlen_attention(model.model)
    loss = TokenLoss().train()
    loss.added_loss = FEATURE.added_loss(train(), units_of(model.model))
    places = torch.arange(TOKENS)[None]
    apart = block_diagonal_mask(model.model.config, places, CuSeqlens.of([[]], TOKENS))
    hidden = model.model(input_ids=torch.zeros_like(places), position_ids=places, use_cache=False, **apart)
    nothing = torch.empty(0, dtype=torch.long)
    total = loss_at_labels(loss, model.lm_head, hidden.last_hidden_state, nothing, nothing)
    total.backward()
    found = gradients_of(model)
    assert float(total.detach()) == 0 and all(float(gradient.abs().max()) == 0 for gradient in found.values())
    assert sum("gate" in name for name in found) >= model.config.num_hidden_layers


def test_a_model_without_such_routers_is_refused() -> None:
    model = LlamaModel(LlamaConfig(hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ConfigError, match="no loss that balances routers"):
        FEATURE.added_loss(train(), units_of(model))
