"""Part of `benchmarks.on_gpu` about hybrids such as Qwen3.5: is the kernel of their gated delta rules right, what does
it keep, what does packing gain; and a duel of eager, compiled and liger's layers on a plain model.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig, Qwen3Config
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks.gpu.run import wait
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.delta_rule import DeltaRule, saved_bytes_per_token
from vlmpipe.trainer.models.attention.varlen import no_mask, use_varlen_attention
from vlmpipe.trainer.preflight import delta_rules

PASSES = 3
LIGER = "liger_kernel"


@dataclass(frozen=True)
class Sizes:
    """A language model, and the lengths of the samples in its sequence."""

    hidden: int
    layers: int
    heads: int
    width: int  # of a head
    lengths: tuple[int, ...]


# A quarter of the layers of Qwen3.5 4B, packed at 8k; samples as long as pages with an image, and short ones.
LARGE = Sizes(2560, 8, 16, 128, (2048, 1536, 1200, 900, 700, 600, 500, 300, 200, 100))
TINY = Sizes(32, 4, 2, 16, (40, 20, 9))


def hybrids(bench: Bench) -> None:
    device, sizes = bench.worker.device, TINY if bench.quick else LARGE
    bench.expect(4)
    model = _hybrid(sizes).to(device, torch.bfloat16)
    (rule,) = delta_rules.rules_in(model)
    bench.report.note(
        f"hybrids: kernel {'installed' if delta_rules.has_kernel() else 'not installed'}; {delta_rules.versions()}"
    )
    with bench.going_on("rightness"):
        _rightness(bench, rule)
    _kept(bench, rule)
    _packing(bench, model, sizes)
    del model
    _duel(bench, sizes)


def _rightness(bench: Bench, rule: DeltaRule) -> None:
    """What preflight asks of the kernel, and how far it and torch's own code in bf16 are from torch's in fp32."""
    bench.at("rightness of the kernel")
    faults = delta_rules.faults_of(rule, bench.worker.device)
    bench.report.answer("gated delta rule on this device", "; ".join(faults) or "right", "torch's own code in fp32")
    if faults:
        raise RuntimeError("; ".join(faults))


def _kept(bench: Bench, rule: DeltaRule) -> None:
    """Bytes saved for the backward pass, a token and layer, beside what is calculated."""
    for name, function, predicted in (
        ("the library's choice", rule.kernel, rule.sizes.kernel_bytes_per_token()),
        ("torch's own code", rule.reference, rule.reference_bytes_per_token()),
    ):
        if name == "the library's choice" and not delta_rules.has_kernel():
            continue
        measured = saved_bytes_per_token(function, rule.sizes, bench.worker.device)
        bench.report.predict("bytes that a gated delta rule keeps, a token and layer", name, "B", predicted, measured)


def _packing(bench: Bench, model: nn.Module, sizes: Sizes) -> None:
    """A packed sequence of samples as rows in mixers, beside a padded sequence for each sample (data.pack: false)."""
    use_varlen_attention(model)
    useful = sum(sizes.lengths)
    sequence = -(-useful // 64) * 64
    sides = {
        "packed": partial(_rate, bench.worker, partial(_step, model, sizes, [list(sizes.lengths)], sequence), useful),
        "one sample a sequence": partial(
            _rate, bench.worker, partial(_steps, model, sizes, sequence), useful
        ),
    }  # fmt: skip
    found = bench.take_turns("packing", sides)
    ours, baseline = (Side(name, found[name]) for name in sides)
    bench.report.compare("hybrid: useful tokens", f"{sizes.layers} layers of {sizes.hidden}", "1 / s", ours, baseline)


def _duel(bench: Bench, sizes: Sizes) -> None:
    """Layers of a plain model: eager, compiled by torch, and with liger's norm, SwiGLU and rope on instances."""
    backend = "eager" if bench.quick else "inductor"
    kinds: dict[str, Callable[[nn.Module], Any]] = {
        "eager": contextlib.nullcontext,
        "compiled": partial(_compiled, backend),
    }
    if importlib.util.find_spec(LIGER) and bench.worker.device.type == "cuda":
        kinds["liger"] = _with_liger
    else:
        bench.report.note("liger is left out of the duel: liger-kernel is not installed, or there is no GPU")
    useful, sequence = sum(sizes.lengths), -(-sum(sizes.lengths) // 64) * 64
    sides: dict[str, Callable[[], float]] = {}
    with contextlib.ExitStack() as stack:
        for name, change in kinds.items():
            model = _plain(sizes).to(bench.worker.device, torch.bfloat16)
            use_varlen_attention(model)
            stack.enter_context(change(model))
            step = partial(_step, model, sizes, [list(sizes.lengths)], sequence)
            sides[name] = partial(_rate, bench.worker, step, useful)
        found = bench.take_turns("duel", sides)
    for name in list(kinds)[1:]:
        data = f"{sizes.layers} layers of {sizes.hidden}"
        bench.report.compare(
            "dense layers: useful tokens", data, "1 / s", Side(name, found[name]), Side("eager", found["eager"])
        )


def _hybrid(sizes: Sizes) -> nn.Module:
    heads = {"linear_num_key_heads": sizes.heads, "linear_num_value_heads": 2 * sizes.heads}
    widths = {"linear_key_head_dim": sizes.width, "linear_value_head_dim": sizes.width, "head_dim": 2 * sizes.width}
    return modeling_qwen3_5.Qwen3_5TextModel(Qwen3_5TextConfig(**_common(sizes), **heads, **widths)).train()


def _plain(sizes: Sizes) -> nn.Module:
    return modeling_qwen3.Qwen3Model(Qwen3Config(**_common(sizes), head_dim=sizes.width)).train()


def _common(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.hidden, "num_hidden_layers": sizes.layers, "intermediate_size": 3 * sizes.hidden,
        "num_attention_heads": sizes.heads, "num_key_value_heads": max(1, sizes.heads // 4), "vocab_size": 16,
    }  # fmt: skip


def _step(model: nn.Module, sizes: Sizes, rows: Sequence[Sequence[int]], sequence: int) -> None:
    """Forward and backward pass of one batch."""
    device = next(model.parameters()).device
    places = torch.stack(
        [torch.cat([torch.arange(count) for count in (*row, sequence - sum(row))]) for row in rows]
    ).to(device)
    samples = CuSeqlens.of(rows, sequence).to(device)
    hidden = torch.ones(len(rows), sequence, sizes.hidden, device=device, dtype=torch.bfloat16)
    output: Tensor = model(
        inputs_embeds=hidden, position_ids=places, attention_mask=no_mask(len(rows), device), samples=samples,
        use_cache=False,
    ).last_hidden_state  # fmt: skip
    output.sum().backward()
    model.zero_grad(set_to_none=True)


def _steps(model: nn.Module, sizes: Sizes, sequence: int) -> None:
    """A step for each sample, padded to the longest, which is what a run without packing can choose."""
    longest = -(-max(sizes.lengths) // 64) * 64
    for tokens in sizes.lengths:
        _step(model, sizes, [[tokens]], min(longest, sequence))


def _rate(worker: ProcessContext, step: Callable[[], None], useful: int) -> float:
    """Useful tokens a second."""
    wait(worker)
    started_s = time.perf_counter()
    for _ in range(PASSES):
        step()
    wait(worker)
    return PASSES * useful / (time.perf_counter() - started_s)


@contextlib.contextmanager
def _compiled(backend: str, model: nn.Module) -> Iterator[None]:
    for layer in model.layers:
        layer.compile(backend=backend)
    yield


@contextlib.contextmanager
def _with_liger(model: nn.Module) -> Iterator[None]:
    """Norms, SwiGLU and rope of these instances."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    for part in model.modules():
        if isinstance(part, modeling_qwen3.Qwen3RMSNorm):
            part.forward = functools.partial(_liger_norm, LigerRMSNormFunction, part)
        if isinstance(part, modeling_qwen3.Qwen3MLP):
            part.forward = functools.partial(_liger_mlp, LigerSiLUMulFunction, part)
    for layer in model.layers:
        attention = layer.self_attn
        attention.forward = _with_functions(attention.forward, apply_rotary_pos_emb=liger_rotary_pos_emb)
    yield


def _liger_norm(function: Any, norm: Any, hidden: Tensor) -> Tensor:
    output: Tensor = function.apply(hidden, norm.weight, norm.variance_epsilon, 0.0, "llama", False)
    return output


def _liger_mlp(function: Any, mlp: Any, hidden: Tensor) -> Tensor:
    output: Tensor = mlp.down_proj(function.apply(mlp.gate_proj(hidden), mlp.up_proj(hidden)))
    return output


def _with_functions(method: Any, **functions: Callable[..., object]) -> Any:
    """A method of one instance that sees other functions of its file."""
    function = getattr(method.__func__, "__wrapped__", method.__func__)
    changed = types.FunctionType(
        function.__code__,
        {**function.__globals__, **functions},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(changed, method.__self__)
