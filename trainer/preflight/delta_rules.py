"""Trial of the kernel of gated delta rules, on the device and before training.

Compilers of kernels have made wrong gradients on some GPUs without an error. A trial has rows of single samples, as
mixers hand them over (`vlmpipe.trainer.models.attention.mixers`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.models.attention.delta_rule import DeltaRule, Rule, call_rule, rule_inputs, rule_of

PACKAGE, EXTRA = "fla", "linear-attention"
DISTRIBUTIONS = ("torch", "triton", "flash-linear-attention", "fla-core")
ROWS = (190, 130)  # tokens of the samples in a trial: several chunks of 64, and a part of one
CHANGED = 20  # tokens after the second sample's end
# Norm of a difference by the norm: kernels multiply parts in bf16, whose rounding makes some 0.01.
TOLERANCE = 0.03
NAMES = ("query", "key", "value", "decay", "beta")


def rules_in(module: nn.Module) -> list[DeltaRule]:
    """The different rules of a model's mixers."""
    return list(dict.fromkeys(rule for part in module.modules() if (rule := rule_of(part))))


def has_kernel() -> bool:
    """Return whether flash-linear-attention is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def versions() -> str:
    """Return the packages of a kernel, as `torch 2.13.0, triton 3.7.1, ...`."""
    installed = []
    for name in DISTRIBUTIONS:
        try:
            installed.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            installed.append(f"no {name}")
    return ", ".join(installed)


def require_right_rules(module: nn.Module, device: torch.device) -> str:
    """Try the rules of a model on its device and return a line to print, empty for a model without any.

    Raises UserError (81) for a kernel that is wrong there.
    """
    rules = rules_in(module)
    if not rules:
        return ""
    if not has_kernel():
        if device.type != "cuda":
            return ""
        saved_bytes = rules[0].reference_bytes_per_token()
        return (
            f"gated delta rules are torch's own code, which keeps {saved_bytes:,} bytes a token and layer and "
            f"is slow on a GPU: make build EXTRAS={EXTRA} adds the kernel of flash-linear-attention to the image"
        )
    require_right(rules, device)
    return f"gated delta rules are the kernel of flash-linear-attention, tried on {device}: {versions()}"


def require_right(rules: Iterable[DeltaRule], device: torch.device) -> None:
    """Raise UserError (81) for a kernel that leaks, or differs from torch's own code."""
    for rule in rules:
        if faults := faults_of(rule, device):
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
            raise UserError(
                f"the kernel of gated delta rules is wrong on {name}: {'; '.join(faults)} ({versions()})",
                expected=f"results and gradients within {TOLERANCE:.0%} of torch's own code, each sample by itself",
                fix=f"build the image without the extra {EXTRA}, or with other versions of triton and "
                "flash-linear-attention; torch's own code is slower and keeps more memory",
                code=ExitCode.WRONG_KERNEL,
            )


def faults_of(rule: DeltaRule, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Return the faults of a kernel as sentences; none for a right one."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        inputs = [tensor.detach() for tensor in rule_inputs(rule.sizes, ROWS, device, dtype)]
    noise = [tensor.flip(1) for tensor in inputs]  # numbers in another order of tokens have the same ranges
    other, after, alone = [], [], [tensor[1:] for tensor in inputs]
    for tensor, changed in zip(inputs, noise, strict=True):
        other.append(torch.cat([changed[:1], tensor[1:]]))
        after.append(tensor.clone())
        after[-1][1, ROWS[1] : ROWS[1] + CHANGED] = changed[1, ROWS[1] : ROWS[1] + CHANGED]
    together, exact = _results(rule.kernel, inputs), _results(rule.reference, [tensor.float() for tensor in inputs])
    variants = [[result[-1] for result in _results(rule.kernel, some)] for some in (other, after, alone)]
    names, faults = ("output", *(f"gradient of {name}" for name in NAMES)), list[str]()
    for name, ours, true, after_other, padded, single in zip(names, together, exact, *variants, strict=True):
        if not torch.equal(ours[1], after_other):
            faults.append(f"the {name} of a sample changes with another sample")
        for changed, what in ((padded, "what stands after it"), (single, "a batch")):
            if not (apart := _apart(changed, ours[1])) <= TOLERANCE:
                faults.append(f"the {name} of a sample changes with {what} by {apart:.2g} of its norm")
        if not (apart := max(map(_apart, ours, true))) <= TOLERANCE:
            faults.append(f"the {name} differs from torch's own by {apart:.2g} of its norm")
    return faults


def _apart(result: Tensor, expected: Tensor) -> float:
    """NaN where a number is."""
    difference = result.double() - expected.double()
    return float(difference.norm() / expected.double().norm().clamp(min=1e-12))


def _results(rule: Rule, inputs: Iterable[Tensor]) -> list[Tensor]:
    """Output and gradients, 0 after the end of each sample: (samples, tokens, ...)."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        output = call_rule(rule, leaves)
        ends = torch.tensor(ROWS[-len(output) :], device=output.device)
        is_own = (torch.arange(output.shape[1], device=output.device) < ends[:, None])[..., None, None]
        weights = torch.linspace(-1, 1, output[0].numel(), device=output.device).view_as(output[0]).cos()
        (output * is_own * weights).sum().backward()
    results = [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return [result.masked_fill(~is_own.view(*is_own.shape[:2], *[1] * (result.ndim - 2)), 0) for result in results]
