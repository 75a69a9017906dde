"""Mixers compute each sample as a row of its own, with the hidden states and gradients that it has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2Model, Qwen3_5TextConfig, Qwen3_5TextModel

from vlmpipe.trainer.models.attention import mixers
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.varlen import block_diagonal_mask, takes_samples, use_varlen_attention

WIDTH, LENGTHS, TOKENS = 16, [[70, 9, 66], [3, 120]], 145  # the longest are of two chunks of 64; the last row is padded
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 10, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gated delta rule": (
        Qwen3_5TextModel,
        Qwen3_5TextConfig,
        {
            "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "head_dim": 8,
            "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        },
    ),
    "short convolution": (
        Lfm2Model,
        Lfm2Config,
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
}  # fmt: skip


def language_model(kind: str) -> Any:
    torch.manual_seed(0)
    model, config, settings = MODELS[kind]
    return model(config(**SIZES | settings)).double().train()


def positions() -> torch.Tensor:
    rows = [torch.cat([torch.arange(length) for length in row]) for row in LENGTHS]
    return torch.stack([torch.nn.functional.pad(row, (0, TOKENS - len(row))) for row in rows])


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_packed_samples_have_the_hidden_states_and_gradients_of_each_alone(kind: str, recomputes: bool) -> None:
    model = language_model(kind)
    hidden = torch.randn(len(LENGTHS), TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    parameters = [hidden, *model.layers.parameters()]
    alone = []
    for row, lengths in enumerate(LENGTHS):
        for start, length in zip([0, *torch.tensor(lengths).cumsum(0).tolist()], lengths, strict=False):
            alone.append(model(inputs_embeds=hidden[row : row + 1, start : start + length]).last_hidden_state[0])
    expected = torch.autograd.grad(torch.cat(alone).square().sum(), parameters)
    assert use_varlen_attention(model) == "" and takes_samples(model.config)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apart = block_diagonal_mask(model.config, positions(), CuSeqlens.of(LENGTHS, TOKENS))
    output = model(inputs_embeds=hidden, position_ids=positions(), use_cache=False, **apart).last_hidden_state
    packed = torch.cat([output[row, : sum(lengths)] for row, lengths in enumerate(LENGTHS)])
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)  # the library's rule computes in fp32
    largest = max(float(one.abs().max()) for one in expected)
    for found, wanted in zip(torch.autograd.grad(packed.square().sum(), parameters), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("kind", MODELS)
def test_without_samples_a_mixer_is_the_librarys(kind: str) -> None:
    model, ids = language_model(kind), torch.arange(10)[None]
    before = model(ids).last_hidden_state
    use_varlen_attention(model)
    assert torch.equal(model(ids).last_hidden_state, before)


def test_padding_alone_gives_every_parameter_a_gradient() -> None:
    """A rank without samples would else wait for others in a collective."""
    model = language_model("gated delta rule")
    use_varlen_attention(model)
    (mixer,) = mixers.mixers_of(model) or ()
    mixer(torch.ones(1, 8, WIDTH, dtype=torch.float64), samples=CuSeqlens.of([[]], 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in mixer.parameters())


def test_a_mixer_of_an_unknown_name_keeps_the_library_attention() -> None:
    model = language_model("gated delta rule")
    model.layers[0].linear_attn = None
    assert use_varlen_attention(model) == "a layer has a mixer that is not known"
    assert not takes_samples(model.config)


def test_a_sequence_is_not_shared_between_ranks() -> None:
    model = language_model("short convolution")
    use_varlen_attention(model)
    (mixer,) = mixers.mixers_of(model) or ()
    with pytest.raises(NotImplementedError, match="cannot share a sequence between ranks"):
        mixer(torch.ones(1, 8, WIDTH), samples=CuSeqlens.of([[8]], 8), context=object())
