"""Gated delta rules of hybrids such as Qwen3.5: which code computes them, and what it keeps.

transformers calls flash-linear-attention where that is installed, and its own code in torch elsewhere.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NAME = "chunk_gated_delta_rule"  # with which its name in transformers' files ends
BYTES = 2  # of bf16
CHUNK = 64  # tokens

Rule = Callable[..., tuple[Tensor, "Tensor | None"]]


@dataclass(frozen=True)
class RuleSizes:
    """Heads and widths of a rule. Each key head serves equally many consecutive value heads."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    def kernel_bytes_per_token(self) -> int:
        """Bytes that flash-linear-attention 0.6 saves for the backward pass: normalized queries and keys with their
        norms, values, decays, betas and the inverse of each chunk. Read in its source, not measured."""
        keys = 2 * self.key_heads * (self.key_width * BYTES + 4)
        values = self.value_heads * (self.value_width + 1 + CHUNK) * BYTES
        return keys + values + 4 * self.value_heads


@dataclass(frozen=True)
class DeltaRule:
    """The rule of a mixer. reference: torch's own code of it, the kernel itself where no other is installed."""

    kernel: Rule
    reference: Rule
    sizes: RuleSizes

    def reference_bytes_per_token(self) -> int:
        """Bytes that torch's own code saves for the backward pass, counted on tensors without memory."""
        return saved_bytes_per_token(self.reference, self.sizes, torch.device("meta"))


def saved_bytes_per_token(rule: Rule, sizes: RuleSizes, device: torch.device, tokens: int = 4 * CHUNK) -> int:
    """Bytes that a rule saves for the backward pass, in memory that no two tensors share."""
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        call_rule(rule, rule_inputs(sizes, [tokens], device))
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) // tokens


def rule_of(mixer: nn.Module) -> DeltaRule | None:
    """The gated delta rule of a mixer; None for others."""
    code = vars(sys.modules[type(mixer).__module__])
    kernel = next((value for name, value in code.items() if name.endswith(NAME)), None)
    heads = [getattr(mixer, name, 0) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")]
    if kernel is None or not all(heads):
        return None
    return DeltaRule(kernel, inspect.unwrap(kernel), RuleSizes(*heads))


def call_rule(rule: Rule, inputs: Iterable[Tensor]) -> Tensor:
    query, key, value, decay, beta = inputs
    output, _ = rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)
    return output


def rule_inputs(
    sizes: RuleSizes, rows: Iterable[int], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Query, key, value, decay in fp32 and beta as a mixer's, with padding after the shorter rows."""
    lengths = list(rows)
    shape = (len(lengths), max(lengths))
    widths = ((sizes.key_heads, sizes.key_width),) * 2 + ((sizes.value_heads, sizes.value_width),)
    made = [torch.randn(*shape, *width, device=device).to(dtype) for width in widths]
    decay = -torch.rand(*shape, sizes.value_heads, device=device) * math.log(2)
    beta = torch.rand(*shape, sizes.value_heads, device=device).to(dtype)
    return [tensor.requires_grad_() for tensor in (*made, decay, beta)]
