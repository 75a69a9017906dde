"""Attention by sample is attention under the mask that keeps samples apart."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DogeConfig,
    DogeModel,
    LlamaConfig,
    LlamaModel,
    NemotronConfig,
    NemotronModel,
    PhimoeConfig,
    PhimoeModel,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
    Qwen3MoeConfig,
    Qwen3MoeModel,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.support.trainer.memory_cases import Case
from vlmpipe.trainer.models.attention import kernels as attention_kernels
from vlmpipe.trainer.models.attention import sample_groups, varlen
from vlmpipe.trainer.models.attention.attend import attend, attend_backward
from vlmpipe.trainer.models.attention.cu_seqlens import PADDING_PIECE, CuSeqlens
from vlmpipe.trainer.models.attention.kernel_choice import is_right
from vlmpipe.trainer.models.attention.kernels import BLOCKWISE, CPU, FLASH, Kernel, VarlenArgs
from vlmpipe.trainer.models.attention.varlen import (
    attention,
    block_diagonal_mask,
    mask_of,
    takes_samples,
    use_varlen_attention,
)
from vlmpipe.trainer.models.layers.recompute_policy import recompute_layers
from vlmpipe.trainer.models.registry import family_of

TOKENS, HEADS, HEAD_DIM, SCALE = 24, 4, 8, 0.3
KERNELS = {"CPU": CPU, "blockwise": BLOCKWISE}
ROWS = [[5, 10, 3], [24], [1, 22]]
Lengths = Sequence[Sequence[int]]


def sequence_lengths() -> st.SearchStrategy[list[list[int]]]:
    """Samples of one to three rows that have room for them."""
    row = st.lists(st.integers(1, TOKENS), max_size=5).map(
        lambda lengths: [
            length for length, end in zip(lengths, itertools.accumulate(lengths), strict=True) if end <= TOKENS
        ]
    )
    return st.lists(row, min_size=1, max_size=3)


def tensors(rows: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key and value, laid out in memory as a layer has them."""
    torch.manual_seed(rows)
    return [
        torch.randn(rows, TOKENS, heads, HEAD_DIM, dtype=dtype, requires_grad=True)
        for heads in (HEADS, kv_heads, kv_heads)
    ]


def is_sample(rows: Lengths) -> Tensor:
    """(rows, tokens), false where padding is."""
    return torch.arange(TOKENS) < torch.tensor([sum(row) for row in rows])[:, None]


def positions(rows: Lengths) -> Tensor:
    """(rows, tokens), as the loader gives them."""
    return torch.stack([torch.cat([torch.arange(length) for length in (*row, TOKENS - sum(row))]) for row in rows])


def under_a_mask(rows: Lengths, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same attention by torch's own, with products of all samples that the mask then drops."""
    config = LlamaConfig(num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    mask = mask_of(config, positions(rows), packed=True)
    repeats = query.shape[2] // key.shape[2]
    heads_first = [query, key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)]
    output = F.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in heads_first), attn_mask=mask, scale=SCALE
    )
    return output.transpose(1, 2)


def with_gradients(output: Tensor, inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    return [output, *torch.autograd.grad(output, inputs, gradient)]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """Each of those that run here, in queries of a few tokens at a time. Samples of up to 6 tokens share calls."""
    monkeypatch.setattr(attention_kernels, "MAX_SCORES", 4 * HEADS * TOKENS)
    monkeypatch.setattr(sample_groups, "MAX_JOINED", 6 * HEADS * HEAD_DIM)
    monkeypatch.setattr("vlmpipe.trainer.models.attention.attend.kernel_for", lambda *_, **__: KERNELS[request.param])
    yield KERNELS[request.param]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_output_and_gradients_are_those_under_a_mask(kv_heads: int) -> None:
    @settings(max_examples=25, deadline=None)
    @given(rows=sequence_lengths())
    def law(rows: list[list[int]]) -> None:
        inputs, samples = tensors(len(rows), kv_heads), CuSeqlens.of(rows, TOKENS)
        gradient = torch.randn(len(rows), TOKENS, HEADS, HEAD_DIM, dtype=torch.float64)
        gradient *= is_sample(rows)[..., None, None]  # nothing that is trained comes from padding
        output, _ = attend(*inputs, samples.bounds, samples.device_bounds, SCALE)
        ours = with_gradients(output, inputs, gradient)
        theirs = with_gradients(under_a_mask(rows, *inputs), inputs, gradient)
        seen = is_sample(rows)[..., None, None]
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.isfinite(mine).all()
            torch.testing.assert_close(mine * seen, other * seen, rtol=1e-9, atol=1e-9)

    law()


@pytest.mark.usefixtures("kernel")
def test_inputs_may_have_the_strides_of_layers() -> None:
    """Queries and keys come from a projection of all heads, transposed; some models cut them out of one tensor."""
    inputs, samples = tensors(3, 2), CuSeqlens.of(ROWS, TOKENS)
    plain, _ = attend(*inputs, samples.bounds, samples.device_bounds, SCALE)
    heads_first = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in inputs]
    in_one = torch.cat(inputs, 2).split([HEADS, 2, 2], 2)
    for others in (heads_first, in_one):
        torch.testing.assert_close(attend(*others, samples.bounds, samples.device_bounds, SCALE)[0], plain)


def test_the_operation_passes_torchs_opcheck() -> None:
    """Schema, gradients, shapes without numbers, and under the tracing of torch.compile: torch's own checks."""
    samples = CuSeqlens.of(ROWS, TOKENS)
    torch.library.opcheck(attend, (*tensors(3, 2, torch.float32), samples.bounds, samples.device_bounds, SCALE))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_inputs_and_nothing_within(dtype: torch.dtype) -> None:
    samples, (query, key, value) = CuSeqlens.of(ROWS, TOKENS), tensors(3, 4, torch.float32)
    casts = [each.to(dtype) for each in (query, key, value.bfloat16())]
    with torch.autocast("cpu", dtype):
        heads_first = [each.transpose(1, 2) for each in (query, key, value.bfloat16())]
        ours, _ = attention(torch.nn.Module(), *heads_first, None, scaling=SCALE, samples=samples)
    plain, _ = attend(*casts, samples.bounds, samples.device_bounds, SCALE)
    assert ours.dtype == dtype and torch.equal(ours, plain)
    expected = under_a_mask(ROWS, *casts) * is_sample(ROWS)[..., None, None]
    torch.testing.assert_close(ours * is_sample(ROWS)[..., None, None], expected, rtol=0.02, atol=0.02)


def test_padding_attends_in_pieces() -> None:
    samples = CuSeqlens.of([[PADDING_PIECE], []], 3 * PADDING_PIECE + 5)
    lengths = samples.device_bounds.diff().tolist()
    assert max(lengths) == PADDING_PIECE and sum(lengths) == 2 * (3 * PADDING_PIECE + 5)
    assert samples.bounds[samples.bounds.diff().flatten() > 0].tolist() == [[0, PADDING_PIECE]]  # nothing of padding


@given(rows=sequence_lengths())
def test_bounds_are_those_of_positions(rows: list[list[int]]) -> None:
    """What the loader gives as positions and what it says of samples is the same."""
    samples = CuSeqlens.of(rows, TOKENS)
    starts = (positions(rows) == 0).flatten().nonzero().flatten()
    ends = torch.cat([starts, torch.tensor([len(rows) * TOKENS])])
    assert torch.equal(samples.device_bounds.unique(), ends.int())
    is_first = is_sample(rows).flatten()[starts]
    held = samples.bounds[samples.bounds.diff().flatten() > 0]
    assert held.tolist() == torch.stack([starts, ends[1:]], 1)[is_first].tolist()
    assert samples.packed or not (starts % TOKENS).any()
    assert samples.packed == (rows != [[TOKENS]] * len(rows))


def test_compiled_code_sees_few_sizes() -> None:
    told = {
        (len(samples.bounds), len(samples.device_bounds))
        for row in ([TOKENS // count] * count for count in range(1, TOKENS + 1))
        for samples in [CuSeqlens.of([row], TOKENS)]
    }
    assert len(told) == 2


def language_model(kind: Any = LlamaModel, config: Any = LlamaConfig, **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 10}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2}
    return kind(config(**sizes | heads | settings)).train()


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_language_models_output_equals_that_under_a_mask(checkpointing: str) -> None:
    model = language_model()
    if checkpointing != "none":
        recompute_layers(model, selective=checkpointing == "selective")
    hidden = torch.randn(len(ROWS), TOKENS, 16, requires_grad=True)
    seen = is_sample(ROWS)[..., None]

    def run() -> list[Tensor]:
        apart = block_diagonal_mask(model.config, positions(ROWS), CuSeqlens.of(ROWS, TOKENS))
        output = model(inputs_embeds=hidden, position_ids=positions(ROWS), use_cache=False, **apart).last_hidden_state
        return with_gradients(output * seen, [hidden, *model.layers.parameters()], torch.ones_like(output))

    under_mask = run()
    use_varlen_attention(model)
    assert takes_samples(model.config)
    for ours, theirs in zip(run(), under_mask, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_empty_mask_cannot_be_computed_with() -> None:
    """A model that passed the samples on to nobody would otherwise mix them."""
    model = language_model()
    use_varlen_attention(model)
    apart = block_diagonal_mask(model.config, positions(ROWS), CuSeqlens.of(ROWS, TOKENS))
    del apart["samples"]
    with pytest.raises(RuntimeError):
        model(inputs_embeds=torch.randn(len(ROWS), TOKENS, 16), position_ids=positions(ROWS), use_cache=False, **apart)


def test_without_samples_it_is_torchs_own_attention() -> None:
    """As in generation, and in rows of which nobody knows where samples are."""
    model, ids = language_model(), torch.arange(10)[None]
    before = model(ids).last_hidden_state
    use_varlen_attention(model)
    assert torch.equal(model(ids).last_hidden_state, before)


class Deaf(LlamaDecoderLayer):
    """Takes further inputs, and passes none on to its attention."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **given: Any) -> Any:
        known = {name: given[name] for name in ("position_ids", "use_cache", "position_embeddings")}
        return super().forward(hidden_states, attention_mask, **known)


class DeafModel(LlamaModel):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.layers = torch.nn.ModuleList([Deaf(config, number) for number in range(config.num_hidden_layers)])


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (language_model(DeafModel), "its layers do not pass further inputs on to attention"),
        (language_model(NemotronModel, NemotronConfig), "its layers do not pass further inputs on to attention"),
        (language_model(PhimoeModel, PhimoeConfig, sliding_window=3), "its layers do not say their windows"),
        (language_model(DogeModel, DogeConfig), "a layer fails on bounds of samples (RuntimeError: "),
        (language_model(attention_dropout=0.1), "its attention has dropout"),
        (language_model(attn_implementation="eager"), "its layers are not plainly causal attention of torch"),
    ],
    ids=["takes and drops", "nemotron", "window in the mask", "doge", "dropout", "another kind of attention"],
)
def test_unsupported_models_keep_their_attention_and_say_why(model: Any, why: str) -> None:
    kind = model.config._attn_implementation
    assert use_varlen_attention(model).startswith(why)
    assert model.config._attn_implementation == kind and not takes_samples(model.config)


@pytest.mark.parametrize(
    ("kind", "config"), [(Qwen2Model, Qwen2Config), (Qwen3Model, Qwen3Config), (Qwen3MoeModel, Qwen3MoeConfig)]
)
@pytest.mark.parametrize("fake", [False, True])
def test_supported_models_are_detected_also_on_fake_tensors(kind: Any, config: Any, fake: bool) -> None:
    varlen._PASSED.clear()
    with FakeTensorMode() if fake else contextlib.nullcontext():
        model = language_model(kind, config)
        random_numbers = torch.get_rng_state()
        use_varlen_attention(model)
    assert takes_samples(model.config)
    assert fake or torch.equal(torch.get_rng_state(), random_numbers), "the run's random numbers stay what they are"


def test_a_trial_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["out of memory", ""])
    monkeypatch.setattr(varlen, "_PASSED", set())
    monkeypatch.setattr(varlen, "_failure_of_kind", lambda *_: next(answers))
    model = language_model()
    assert use_varlen_attention(model) == "out of memory" and not takes_samples(model.config)
    assert use_varlen_attention(model) == "" and takes_samples(model.config)
    assert use_varlen_attention(language_model()) == "", "no third trial"


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_language_models_of_all_families_are_supported(family: str) -> None:
    config = Case("ddp", family=family).config(1).model
    model = family_of(config).skeleton(config, vocabulary=300)
    module: Any = family_of(config).training_module(config, model, cached=True)
    assert takes_samples(getattr(module.model.model, module.language_part).config)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"softcap": 30.0}, "softcap"), ({"dropout": 0.1}, "dropout"), ({"is_causal": False}, "is_causal")],
)
def test_unsupported_features_are_refused(given: dict[str, Any], named: str) -> None:
    heads_first = [each.transpose(1, 2) for each in tensors(3, 2)]
    with pytest.raises(NotImplementedError, match=named):
        attention(torch.nn.Module(), *heads_first, None, samples=CuSeqlens.of(ROWS, TOKENS), **given)
    attention(torch.nn.Module(), *heads_first, None, samples=CuSeqlens.of(ROWS, TOKENS), dropout=0.0, is_causal=True)


def test_flops_are_those_of_the_samples() -> None:
    samples, inputs = CuSeqlens.of(ROWS, TOKENS), tensors(3, 2)
    with FlopCounterMode(display=False) as counter:
        output, _ = attend(*inputs, samples.bounds, samples.device_bounds, SCALE)
        forward = counter.get_total_flops()
        output.sum().backward()
    pairs = sum(length**2 for row in ROWS for length in row)
    assert forward == 4 * pairs * HEADS * HEAD_DIM
    assert counter.get_total_flops() == 3 * forward


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]], ids=["rows", "one row"])
@pytest.mark.parametrize("heads_first", [False, True], ids=["tokens first", "heads first"])
@pytest.mark.parametrize("kernel", [FLASH, BLOCKWISE], ids=["flash", "blockwise"])
def test_gpu_kernels_do_not_synchronize_with_the_host(kernel: Kernel, heads_first: bool, rows: Lengths) -> None:
    """On tensors without numbers, by torch's own rules of sizes: what there is to know lies on the host."""
    samples = CuSeqlens.of(rows, TOKENS).to(torch.device("meta"))
    inputs = [each.detach().to("meta", torch.bfloat16) for each in tensors(len(rows), 2)]
    if heads_first:
        inputs = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in inputs]
    call = VarlenArgs(samples.bounds, samples.device_bounds, SCALE)
    output, lse = kernel.forward(*inputs, call)
    said = attend(*inputs, *call)  # what layers that are compiled for a GPU go by
    assert [described(one) for one in (output, lse)] == [described(one) for one in said]
    found = kernel.backward(output, *inputs, output, lse, call)
    said_back = attend_backward(output, *inputs, output, lse, *call)
    assert [described(one) for one in found] == [described(one) for one in said_back]


def described(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def wrong_in(part: str) -> Kernel:
    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        output, lse = CPU.forward(*given)
        return (output * 1.1 if part == "output" else output), lse

    def backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        if part == "an error":
            raise RuntimeError("no kernel image is available\nand more")
        query, key, value = CPU.backward(*given)
        return query, (key.flip(1) if part == "a gradient" else key), (value * torch.nan if part == "NaN" else value)

    return replace(CPU, forward=forward, backward=backward)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_correct_kernel_passes_its_trial(dtype: torch.dtype) -> None:
    query, key, _ = tensors(1, 2, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = torch.get_rng_state()
        assert is_right(CPU, query, key)
        assert torch.equal(torch.get_rng_state(), state)


def other_in_padding() -> Kernel:
    """As the flash kernel is, to which padding is samples like others."""

    def changed(tensor: Tensor, args: VarlenArgs) -> Tensor:
        is_padding = torch.ones(tensor.shape[:2].numel(), dtype=torch.bool)
        for first, end in args.bounds.tolist():
            is_padding[first:end] = False
        assert is_padding.any()
        return torch.where(is_padding.view(*tensor.shape[:2], 1, 1), 7.0, tensor)

    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        output, lse = CPU.forward(*given)
        return changed(output, given[-1]), lse

    def backward(*given: Any) -> tuple[Tensor, ...]:
        return tuple(changed(each, given[-1]) for each in CPU.backward(*given))

    return replace(CPU, forward=forward, backward=backward)


def test_what_a_kernel_finds_in_padding_is_not_judged() -> None:
    query, key, _ = tensors(1, 2, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_right(other_in_padding(), query, key)


@pytest.mark.parametrize("part", ["output", "a gradient", "NaN", "an error"])
def test_a_wrong_kernel_is_reported_and_not_used(part: str) -> None:
    query, key, _ = tensors(1, 2, torch.bfloat16)
    with pytest.warns(UserWarning, match="is not used for 4 heads of 8 in torch.bfloat16 on cpu: "):
        assert not is_right(wrong_in(part), query, key)
