"""Part `attention`: one layer over packed sequences, by sample or under a mask over the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.support.suite import Bench
from vlmpipe.trainer.models.attention.attend import attend
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens, equal_lengths
from vlmpipe.trainer.models.attention.varlen import mask_of

HOST = torch.device("cpu")
CLOSE = 1e-5  # absolute, of numbers near 1 in fp32
SDPA = SimpleNamespace(_attn_implementation="sdpa")


@dataclass(frozen=True)
class Packed:
    """One sequence of samples that are about equally long."""

    tokens: int
    samples: int
    heads: int = 8
    head_dim: int = 64

    @property
    def lengths(self) -> list[int]:
        return equal_lengths(self.tokens, self.samples)

    def text(self) -> str:
        return f"{self.samples} samples in {self.tokens:,} tokens, {self.heads} heads of {self.head_dim}"


FULL = (Packed(2048, 10), Packed(8192, 30))
QUICK = (Packed(512, 4),)


def attention(bench: Bench) -> None:
    """Of one layer, in fp32 on the processor."""
    sequences = QUICK if bench.quick else FULL
    bench.expect(2 * len(sequences))
    for packed in sequences:
        pairs = zip(*map(results, sides(packed).values()), strict=True)
        same = all(torch.allclose(ours, masked, atol=CLOSE) for ours, masked in pairs)
        bench.report.require(same, "attention and its gradients are the same by sample and under a mask")
        for claim, count in (("attention: forward", forward), ("attention: forward and backward", results)):
            works = {name: partial(times, count, side, packed.tokens) for name, side in sides(packed).items()}
            found = bench.take_timed_turns(f"{claim}, {packed.tokens:,} tokens", works)
            bench.report.compare_rates(claim, packed.text(), "tokens", *found.items())


@dataclass(frozen=True)
class Attention:
    """One way to compute it, with the inputs of the other."""

    inputs: tuple[Tensor, Tensor, Tensor]  # query, key and value, (1, tokens, heads, head_dim) each
    gradient: Tensor  # of the output
    compute: Callable[[Tensor, Tensor, Tensor], Tensor]


def sides(packed: Packed, device: torch.device = HOST, dtype: torch.dtype = torch.float32) -> dict[str, Attention]:
    torch.manual_seed(0)
    size = (1, packed.tokens, packed.heads, packed.head_dim)
    query, key, value, gradient = (torch.randn(size, device=device).to(dtype) for _ in range(4))
    inputs = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
    samples = CuSeqlens.of([packed.lengths], packed.tokens).to(device)
    rest = samples.bounds, samples.device_bounds, packed.head_dim**-0.5
    positions = torch.cat([torch.arange(length) for length in packed.lengths])[None].to(device)
    mask = mask_of(SDPA, positions, packed=True)

    def by_sample(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, _ = attend(query, key, value, *rest)
        return output

    def under_a_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)

    both = {"by sample": by_sample, "under a mask": under_a_mask}
    return {name: Attention(inputs, gradient, compute) for name, compute in both.items()}


def forward(side: Attention) -> tuple[Tensor, ...]:
    return (side.compute(*side.inputs),)


def results(side: Attention) -> tuple[Tensor, ...]:
    """The output, and the gradients of query, key and value."""
    (output,) = forward(side)
    return output, *torch.autograd.grad(output, side.inputs, side.gradient)


def times(work: Callable[[Attention], object], side: Attention, tokens: int) -> float:
    work(side)
    return tokens
