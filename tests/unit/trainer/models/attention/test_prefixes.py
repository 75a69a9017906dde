"""Attention with shared prefixes is attention under the mask that says what a token sees."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vlmpipe.trainer.models.attention import kernels as attention_kernels
from vlmpipe.trainer.models.attention import sample_groups
from vlmpipe.trainer.models.attention.attend import attend, attend_backward
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.kernel_choice import is_right
from vlmpipe.trainer.models.attention.kernels import BLOCKWISE, CPU, FLASH, Kernel, VarlenArgs
from vlmpipe.trainer.models.attention.merged_parts import with_prefixes
from vlmpipe.trainer.models.attention.varlen import attention

TOKENS, HEADS, KV_HEADS, HEAD_DIM, SCALE = 60, 4, 2, 8, 0.3
KERNELS = {"CPU": CPU, "blockwise": BLOCKWISE}


@dataclass(frozen=True)
class Tree:
    """A segment, the whole of which its children see."""

    tokens: int
    children: tuple[Tree, ...] = ()


def branches() -> st.SearchStrategy[Tree]:
    return st.builds(Tree, st.integers(1, 4))


def trees() -> st.SearchStrategy[Tree]:
    """A sample alone, a prefix with branches, or one with pairs in its branches."""
    pairs = st.builds(Tree, st.integers(1, 3), st.lists(branches(), max_size=2).map(tuple))
    return st.builds(Tree, st.integers(1, 6), st.lists(pairs, max_size=3).map(tuple))


class Sequence:
    """Trees of one packed sequence: bounds, and the mask by the words."""

    def __init__(self, roots: list[Tree]) -> None:
        self.lengths: list[int] = []
        self.prefixes: list[tuple[int, int, int]] = []
        self.mask = torch.eye(TOKENS, dtype=torch.bool)
        for root in roots:
            if sum(self.lengths) + size(root) <= TOKENS:
                self.add(root, [])

    def add(self, tree: Tree, ancestors: list[slice]) -> None:
        start = sum(self.lengths)
        tokens = slice(start, start + tree.tokens)
        self.lengths.append(tree.tokens)
        self.mask[tokens, tokens] = torch.ones(tree.tokens, tree.tokens).tril().bool()
        for ancestor in ancestors:
            self.mask[tokens, ancestor] = True
        for child in tree.children:
            self.add(child, [*ancestors, tokens])
        if tree.children:
            self.prefixes.append((tokens.start, tokens.stop, sum(self.lengths)))


def size(tree: Tree) -> int:
    return tree.tokens + sum(map(size, tree.children))


def test_runs_go_on_behind_the_prefix_that_the_first_of_its_samples_has() -> None:
    """An image with two pairs, a sample alone, and two questions about an image."""
    prefixes = [(0, 3, 16), (3, 5, 9), (9, 12, 16), (20, 22, 28)]
    samples = CuSeqlens.of([[3, 2, 1, 3, 3, 2, 2, 4, 2, 1, 5]], TOKENS, [prefixes])
    assert [(run.start, run.end, run.after) for run in samples.runs()] == [
        (0, 6, None), (6, 9, 5), (9, 14, 3), (14, 16, 12), (16, 20, None), (20, 23, None), (23, 28, 22),
    ]  # fmt: skip


def bounds_of(*sequences: Sequence) -> CuSeqlens:
    lengths, prefixes = zip(*((sequence.lengths, sequence.prefixes) for sequence in sequences), strict=True)
    return CuSeqlens.of(lengths, TOKENS, prefixes)


def heads(rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    noise = torch.Generator().manual_seed(0)
    counts = (HEADS, KV_HEADS, KV_HEADS)
    made = (torch.randn(rows, TOKENS, count, HEAD_DIM, generator=noise, dtype=torch.float64) for count in counts)
    return [tensor.to(dtype).requires_grad_() for tensor in made]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each of those that run here, in blocks of a few queries, with and without calls that short segments share."""
    monkeypatch.setattr(attention_kernels, "MAX_SCORES", 7 * HEADS * TOKENS)
    monkeypatch.setattr(sample_groups, "MAX_JOINED", 3 * HEADS * HEAD_DIM)
    monkeypatch.setattr("vlmpipe.trainer.models.attention.attend.kernel_for", lambda *_, **__: KERNELS[request.param])
    yield


@pytest.mark.usefixtures("kernel")
def test_output_and_gradients_are_those_under_the_mask() -> None:
    @settings(max_examples=40, deadline=None)
    @given(roots=st.lists(st.lists(trees(), min_size=1, max_size=5), min_size=1, max_size=2))
    def law(roots: list[list[Tree]]) -> None:
        rows = [Sequence(root) for root in roots]
        samples, inputs = bounds_of(*rows), heads(len(rows))
        query, key, value = (tensor.transpose(1, 2) for tensor in inputs)
        repeated = [each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value)]
        mask = torch.stack([row.mask for row in rows])[:, None]
        theirs = F.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=SCALE).transpose(1, 2)
        used = torch.stack([torch.arange(TOKENS) < sum(row.lengths) for row in rows])
        weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        weights = weights * used[..., None, None]
        bounds = (samples.bounds, samples.device_bounds)
        ours, _ = attend(*inputs, *bounds, SCALE, 0, None, samples.prefixes)
        torch.testing.assert_close(ours[used], theirs[used], rtol=1e-9, atol=1e-9)
        gradients = [torch.autograd.grad((each * weights).sum(), inputs) for each in (ours, theirs)]
        for found, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)

    law()


SHARED = Sequence([Tree(20, (Tree(8), Tree(9))), Tree(7), Tree(5, (Tree(4),))])


def deaf(part: str) -> Kernel:
    """Wrong where queries see other keys than their own."""

    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        output, lse = CPU.forward(*given)
        is_rectangle = given[-1].keys is not None
        return output * (1.1 if part == "output" and is_rectangle else 1), lse + (
            0.3 if part == "log-sum-exp" and is_rectangle else 0
        )

    def backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, args = given
        if args.keys is not None and part == "own sum":  # as of a gradient that passes no log-sum-exp back
            inputs[4:] = CPU.forward(*inputs[1:4], args)
        return CPU.backward(*inputs, args)

    return replace(CPU, forward=forward, backward=backward)


@pytest.mark.parametrize("part", ["output", "log-sum-exp", "own sum"])
def test_a_kernel_that_is_wrong_with_prefixes_alone_is_reported(part: str) -> None:
    query, key, _ = heads(1, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_right(CPU, query, key, shared=True) and is_right(deaf(part), query, key)
    with pytest.warns(UserWarning, match="attention of samples with shared prefixes is not used for 4 heads of 8"):
        assert not is_right(deaf(part), query, key, shared=True)


@pytest.mark.parametrize("kernel", [FLASH, BLOCKWISE], ids=["flash", "blockwise"])
def test_gpu_kernels_do_not_synchronize_with_the_host(kernel: Kernel) -> None:
    """On tensors without numbers: what there is to know lies on the host."""
    device = torch.device("meta")
    samples = bounds_of(SHARED, SHARED).to(device)
    inputs = [each.detach().to("meta", torch.bfloat16) for each in heads(2)]
    assert samples.prefixes is not None and samples.prefixes.device.type == "cpu"
    shared = with_prefixes(kernel, samples.prefixes, device)
    args = VarlenArgs(samples.bounds, samples.device_bounds, SCALE)
    output, lse = shared.forward(*inputs, args)
    told = (samples.bounds, samples.device_bounds, SCALE, 0, None, samples.prefixes)
    assert [(each.shape, each.dtype) for each in (output, lse)] == [
        (each.shape, each.dtype) for each in attend(*inputs, *told)
    ]
    gradients = shared.backward(output, *inputs, output, lse, args)
    told_back = attend_backward(output, *inputs, output, lse, *told)
    assert [each.shape for each in gradients] == [each.shape for each in told_back]


def test_no_kernel_gets_queries_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of GPUs return NaN for those, or fail."""
    calls: list[VarlenArgs] = []

    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        calls.append(given[-1])
        return CPU.forward(*given)

    noting = replace(CPU, forward=forward)
    monkeypatch.setattr("vlmpipe.trainer.models.attention.attend.kernel_for", lambda *_, **__: noting)
    lone = Sequence([Tree(9), Tree(1)])  # a sequence of a batch in which nothing is shared
    samples = bounds_of(lone, SHARED)
    attend(*heads(2), samples.bounds, samples.device_bounds, SCALE, 0, None, samples.prefixes)
    assert [call.keys is None for call in calls] == [True, False]
    keys = calls[1].keys
    assert keys is not None
    assert calls[1].bounds.diff().flatten().tolist()[:2] == [17, 4] and keys.bounds.diff().flatten().tolist()[:2] == [
        20,
        5,
    ]
    assert torch.equal(calls[1].bounds.diff() > 0, keys.bounds.diff() > 0)
    assert bounds_of(lone).prefixes is None


def test_flops_of_branches_with_their_prefix_count_as_those_of_whole_samples() -> None:
    samples, inputs = bounds_of(SHARED), heads(1)
    with FlopCounterMode(display=False) as counter:
        output, _ = attend(*inputs, samples.bounds, samples.device_bounds, SCALE, 0, None, samples.prefixes)
        forward = counter.get_total_flops()
        output.sum().backward()
    squares = 20**2 + (8**2 + 2 * 8 * 20) + (9**2 + 2 * 9 * 20) + 7**2 + 5**2 + (4**2 + 2 * 4 * 5)
    assert forward == 4 * squares * HEADS * HEAD_DIM
    assert counter.get_total_flops() == 3 * forward


def test_a_layer_with_a_window_refuses_prefixes() -> None:
    heads_first = [each.transpose(1, 2) for each in heads(1)]
    with pytest.raises(NotImplementedError, match="window"):
        attention(torch.nn.Module(), *heads_first, None, samples=bounds_of(SHARED), sliding_window=4)
