"""Attention by sample in windows, and with images whose tokens see each other, is attention under the same mask."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    Cohere2Config,
    Cohere2Model,
    DeepseekV3Config,
    DeepseekV3Model,
    Exaone4Config,
    Exaone4Model,
    Gemma3TextConfig,
    Gemma3TextModel,
    Gemma4TextConfig,
    Gemma4TextModel,
    MistralConfig,
    MistralModel,
)

from vlmpipe.trainer.models.attention import kernels as attention_kernels
from vlmpipe.trainer.models.attention import sample_groups
from vlmpipe.trainer.models.attention.attend import attend, forward_flops
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.kernel_choice import is_right
from vlmpipe.trainer.models.attention.kernels import BLOCKWISE, CPU, VarlenArgs
from vlmpipe.trainer.models.attention.merged_parts import image_blocks
from vlmpipe.trainer.models.attention.varlen import attention, no_mask, use_varlen_attention

TOKENS, HEADS, KV_HEADS, HEAD_DIM, SCALE = 40, 4, 2, 8, 0.3
KERNELS = {"CPU": CPU, "blockwise": BLOCKWISE}
TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "vocab_size": 10, "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5, "pad_token_id": 0,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 10,
    "num_hidden_layers": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 4, "first_k_dense_replace": 2,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any]] = {
    "Gemma 3": (Gemma3TextModel, Gemma3TextConfig(**TINY)),
    "Gemma 4": (Gemma4TextModel, Gemma4TextConfig(**TINY, global_head_dim=16, hidden_size_per_layer_input=0)),
    "Cohere 2": (Cohere2Model, Cohere2Config(**TINY)),
    "Exaone 4": (Exaone4Model, Exaone4Config(**TINY)),
    "Mistral": (MistralModel, MistralConfig(**{name: one for name, one in TINY.items() if name != "layer_types"})),
    "values of another width": (DeepseekV3Model, DeepseekV3Config(**LATENT)),
}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each of those that run here, in blocks of a few queries, with and without calls that short samples share."""
    monkeypatch.setattr(attention_kernels, "MAX_SCORES", 7 * HEADS * TOKENS)
    monkeypatch.setattr(attention_kernels, "CPU_BLOCK", 4)
    monkeypatch.setattr(sample_groups, "MAX_JOINED", 12 * HEADS * HEAD_DIM)
    monkeypatch.setattr("vlmpipe.trainer.models.attention.attend.kernel_for", lambda *_, **__: KERNELS[request.param])
    yield


def seen(lengths: list[int], is_image: Tensor, window: int) -> Tensor:
    """(tokens, tokens), by the words: own sample, the window, earlier tokens or those of the own image."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    image = torch.full((len(sample),), -1)
    number = 0
    for place in range(len(sample)):
        is_new = place == 0 or not is_image[place - 1] or sample[place] != sample[place - 1]
        number += int(is_new)
        image[place] = number if is_image[place] else -1
    own, keys = torch.arange(len(sample))[:, None], torch.arange(len(sample))
    same_image = (image[:, None] == image) & (image >= 0)
    near = own - keys < window if window else torch.ones(len(sample), len(sample), dtype=torch.bool)
    return (sample[:, None] == sample) & near & ((keys <= own) | same_image)


@pytest.mark.usefixtures("kernel")
def test_output_and_gradients_are_those_under_a_mask() -> None:
    @settings(max_examples=40, deadline=None)
    @given(
        cuts=st.lists(st.integers(1, TOKENS - 1), max_size=4, unique=True),
        window=st.integers(0, 12),
        is_image=st.lists(st.booleans(), min_size=TOKENS // 4, max_size=TOKENS // 4),
    )
    def law(cuts: list[int], window: int, is_image: list[bool]) -> None:
        edges = [0, *sorted(cuts), TOKENS]
        lengths = [end - start for start, end in itertools.pairwise(edges)]
        images = torch.tensor(is_image).repeat_interleave(4)
        samples = image_blocks(images[None], CuSeqlens.of([lengths], TOKENS), windows_only=False)
        torch.manual_seed(0)
        inputs = [
            torch.randn(1, TOKENS, heads, HEAD_DIM, dtype=torch.float64, requires_grad=True)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        gradient = torch.randn(1, TOKENS, HEADS, HEAD_DIM, dtype=torch.float64)
        bounds = (samples.bounds, samples.device_bounds, SCALE)
        ours, _ = attend(*inputs, *bounds, window, samples.image_blocks)
        query, key, value = (one.transpose(1, 2) for one in inputs)
        repeated = [one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (key, value)]
        mask = seen(lengths, images, window)
        theirs = F.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=SCALE).transpose(1, 2)
        found = [ours, *torch.autograd.grad(ours, inputs, gradient)]
        expected = [theirs, *torch.autograd.grad(theirs, inputs, gradient)]
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)

    law()


def test_gradients_of_many_blocks_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16: three times as far from those in fp32 where each block's part is rounded to the sum so far."""
    monkeypatch.setattr(attention_kernels, "CPU_BLOCK", 1)
    samples = CuSeqlens.of([[96]], 96)
    args = VarlenArgs(samples.bounds, samples.device_bounds, SCALE, window=64)
    noise = torch.Generator().manual_seed(0)
    all_heads = (HEADS, HEADS, KV_HEADS, KV_HEADS)  # of the output's gradient, query, key and value
    rounded = [torch.randn(1, 96, heads, HEAD_DIM, generator=noise).bfloat16() for heads in all_heads]

    def gradients(gradient: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return CPU.backward(gradient, *inputs, *CPU.forward(*inputs, args), args)

    exact = gradients(*(tensor.float() for tensor in rounded))
    for found, expected in zip(gradients(*rounded), exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert torch.dist(found.float(), expected) < 0.006 * expected.norm()


def test_a_kernel_that_leaves_windows_out_is_found_wrong() -> None:
    def whole(args: VarlenArgs) -> VarlenArgs:
        return args._replace(window=0)

    deaf = attention_kernels.Kernel(
        lambda *inputs: CPU.forward(*inputs[:-1], whole(inputs[-1])),
        lambda *inputs: CPU.backward(*inputs[:-1], whole(inputs[-1])),
    )
    query, key = torch.randn(1, 4, HEADS, HEAD_DIM), torch.randn(1, 4, KV_HEADS, HEAD_DIM)
    assert is_right(deaf, query, key) and is_right(CPU, query, key, 3)
    with pytest.warns(UserWarning, match="differ from those of plain products"):
        assert not is_right(deaf, query, key, 3)


@pytest.mark.parametrize("name", MODELS)
def test_packed_samples_have_the_hidden_states_and_gradients_of_each_alone(name: str) -> None:
    """In the library's own attention under its own masks."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind(config).train()
    lengths = [3, 17, 9, 1]
    embeddings = torch.randn(1, sum(lengths), config.hidden_size)

    def gradients() -> list[Tensor]:
        found = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        model.zero_grad()
        return found

    alone = [model(inputs_embeds=each, use_cache=False).last_hidden_state for each in embeddings.split(lengths, 1)]
    weights = torch.randn_like(embeddings)
    (torch.cat(alone, 1) * weights).sum().backward()
    expected = gradients()
    assert use_varlen_attention(model) == ""
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    apart = {"attention_mask": no_mask(1, places.device), "samples": CuSeqlens.of([lengths], sum(lengths))}
    packed = model(inputs_embeds=embeddings, position_ids=places, use_cache=False, **apart).last_hidden_state
    (packed * weights).sum().backward()
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-6, atol=1e-6 * float(packed.detach().abs().max()))
    for found, own in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4 * float(own.abs().max()))
    again = model(inputs_embeds=embeddings[:, :9], use_cache=False).last_hidden_state
    mask = torch.ones(1, 9)
    assert torch.equal(again, model(inputs_embeds=embeddings[:, :9], attention_mask=mask).last_hidden_state)


def test_images_see_each_other_in_layers_with_windows_only_where_the_type_says_so() -> None:
    samples = image_blocks(torch.ones(1, 6).bool(), CuSeqlens.of([[6]], 6), windows_only=True)
    heads = [torch.randn(1, 2, 6, 8) for _ in range(3)]
    windowed, _ = attention(torch.nn.Module(), *heads, None, samples=samples, sliding_window=4)
    whole, _ = attention(torch.nn.Module(), *heads, None, samples=samples)
    causal, _ = attention(torch.nn.Module(), *heads, None, samples=CuSeqlens.of([[6]], 6))
    assert torch.equal(whole, causal)
    assert float((windowed - causal)[0, 0].detach().abs().max()) > 0.1, "the first token sees later ones"


def test_flops_of_windows_are_of_tokens_in_sight() -> None:
    query, samples = torch.empty(1, TOKENS, HEADS, HEAD_DIM), CuSeqlens.of([[3, 30]], TOKENS)
    found = forward_flops(query, query, query, samples.bounds, samples.device_bounds, 1.0, 5)
    pairs = sum(min(place + 1, 5) for length in (3, 30) for place in range(length))
    assert found == 4 * HEADS * HEAD_DIM * (2 * pairs - (3 + 5))  # twice a triangle is counted as its square
