"""Part `prefixes` of `benchmarks.on_gpu`: attention of samples that share a prefix, merged from two calls, beside
FlexAttention under a mask and beside each sample with a prefix of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.gpu.attention import ATTENTION_PASSES, NAMES, difference
from benchmarks.gpu.run import each, wait
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.attention.attend import attend
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.kernel_choice import kernel_for

FLEX_TOLERANCE = 0.02  # of the norm, in bf16

Compute = Callable[[Sequence[Tensor]], Tensor]  # query, key and value (1, tokens, heads, head_dim) -> output


@dataclass(frozen=True)
class Groups:
    """Equal groups in one sequence without padding."""

    groups: int
    questions: int  # in each group
    prefix: int  # tokens
    branch: int  # tokens
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def group_tokens(self) -> int:
        return self.prefix + self.questions * self.branch

    @property
    def tokens(self) -> int:
        return self.groups * self.group_tokens

    @property
    def all_questions(self) -> int:
        return self.groups * self.questions

    def shared(self) -> CuSeqlens:
        lengths = [self.prefix, *[self.branch] * self.questions] * self.groups
        starts = range(0, self.tokens, self.group_tokens)
        spans = [(start, start + self.prefix, start + self.group_tokens) for start in starts]
        return CuSeqlens.of([lengths], self.tokens, [spans])

    def separate(self) -> CuSeqlens:
        lengths = [self.prefix + self.branch] * self.all_questions
        return CuSeqlens.of([lengths], sum(lengths))

    def inputs(self, tokens: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        noise = torch.Generator(device).manual_seed(0)
        return [
            torch.randn(1, tokens, heads, self.head_dim, generator=noise, device=device).to(dtype).requires_grad_()
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        ]


CASES = {
    "heads of Qwen2.5-VL-7B, 13 questions on 234 image tokens": Groups(7, 13, 258, 24, 28, 4),
    "heads of LLaVA-1.5-7B, 13 questions on 576 image tokens": Groups(4, 13, 616, 24, 32, 32),
    "heads of Qwen2.5-VL-7B, 4 questions on 1,280 image tokens": Groups(3, 4, 1304, 26, 28, 4),
}
QUICK_CASE = {"small": Groups(2, 3, 40, 8, 4, 2, 16)}


def prefixes(bench: Bench) -> None:
    """The rate of questions, forward and backward, and how far results are apart."""
    device = bench.worker.device
    has_gpu = device.type == "cuda"  # FlexAttention has no backward pass on a processor
    dtype = torch.bfloat16 if has_gpu else torch.float32
    cases = QUICK_CASE if bench.quick else CASES
    bench.expect(len(cases))
    for name, groups in each(bench, cases, len(cases)):
        together, apart = groups.inputs(groups.tokens, device, dtype), groups.separate()
        alone = groups.inputs(groups.all_questions * (groups.prefix + groups.branch), device, dtype)
        merged, under_mask = by_parts(groups.shared(), device), by_flex(groups, device, compiled=has_gpu)
        both = (results(compute, together, gradients=has_gpu) for compute in (merged, under_mask))
        found = max(difference(ours, theirs.cpu().double()) for ours, theirs in zip(*both, strict=True))
        law = f"FlexAttention under the mask gives what is merged (within {FLEX_TOLERANCE:g} of the norm)"
        bench.report.require(found < FLEX_TOLERANCE, law, found=f"{found:g}")
        timed = {"merged": (merged, together), "each by itself": (by_parts(apart, device), alone)}
        timed |= {"FlexAttention": (under_mask, together)} if has_gpu else {}
        kernel = NAMES[kernel_for(together[0], together[1], shared=True)]
        rates = bench.take_turns(
            f"{name}, {dtype}",
            {side: partial(questions_per_s, *of_side, groups, bench.worker) for side, of_side in timed.items()},
        )
        for other in list(timed)[1:]:
            ours = Side(f"merged, {kernel}", rates["merged"])
            claim = "attention of questions that share a prefix: forward and backward"
            bench.report.compare(claim, name, "questions / s", ours, Side(other, rates[other]))


def results(compute: Compute, inputs: Sequence[Tensor], *, gradients: bool) -> list[Tensor]:
    """The output, and the gradients of all inputs where these are asked for."""
    if not gradients:
        return [compute([tensor.detach() for tensor in inputs])]
    output = compute(inputs)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]


def by_parts(samples: CuSeqlens, device: torch.device) -> Compute:
    moved = samples.to(device)

    def compute(inputs: Sequence[Tensor]) -> Tensor:
        query, key, value = inputs
        scale = query.shape[-1] ** -0.5
        bounds = (moved.bounds, moved.device_bounds)
        output, _ = attend(query, key, value, *bounds, scale, 0, None, moved.prefixes)
        return output

    return compute


def by_flex(groups: Groups, device: torch.device, *, compiled: bool) -> Compute:
    """Each token sees what is before it in its own segment and in the prefix of its group."""
    lengths = [groups.prefix, *[groups.branch] * groups.questions] * groups.groups
    ends = list(itertools.accumulate(lengths))
    first, stop = torch.empty(2, groups.tokens, dtype=torch.int64).unbind()
    for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        is_prefix = number % (groups.questions + 1) == 0
        first[end - length : end] = end - length
        stop[end - length : end] = end + groups.questions * groups.branch if is_prefix else end
    begins, ends_at = first.to(device), stop.to(device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (begins[query] >= begins[key]) & (begins[query] < ends_at[key])

    mask = create_block_mask(sees, None, None, groups.tokens, groups.tokens, device=str(device))
    kernel = torch.compile(flex_attention, dynamic=True) if compiled else flex_attention

    def compute(inputs: Sequence[Tensor]) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in inputs)
        output: Tensor = kernel(query, key, value, block_mask=mask, enable_gqa=groups.heads != groups.kv_heads)
        return output.transpose(1, 2)

    return compute


def questions_per_s(compute: Compute, inputs: Sequence[Tensor], groups: Groups, worker: ProcessContext) -> float:
    wait(worker)
    started_s = time.perf_counter()
    for _ in range(ATTENTION_PASSES):
        torch.autograd.grad(compute(inputs).sum(), inputs)
    wait(worker)
    return ATTENTION_PASSES * groups.all_questions / (time.perf_counter() - started_s)
