"""Parts of `benchmarks.on_gpu`: losses beside the host's, and steps that read nothing of the device."""

from __future__ import annotations

import tempfile
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.run import OFFLOAD_ALL, TINY, WARM_UP, alone, case_of, each
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.tiny_run import TinyRun
from tests.support.trainer.memory_cases import (
    ADAPTERS,
    BF16,
    BF16_SUMS,
    CHECKPOINTING,
    IN_8_BITS,
    IN_CHUNKS,
    IN_HOST,
    NF4,
    ONLINE,
    SELECTIVE,
    Case,
)

MOMENTS = {"8-bit moments": False, "8-bit moments, after a resume": True}  # whether it resumes
ALONE = ("ddp", "fsdp", "zero1", "zero2", "zero3")  # strategies that one process can run
ON_DEVICE_ONLY = {
    "train.compile",
    "train.compile_backend",
    "train.offload",
    "train.activation_offloading",
    "train.gradient_accumulation_dtype",  # DeepSpeed sums offloaded gradients in bf16
}
FAMILIES = ("llava", "smolvlm", "qwen2_5_vl", "qwen3_vl")
LOSS_STEPS = 5
COMPILED: dict[str, Any] = {"train.compile": "on", "train.compile_backend": "inductor"}

# What computes otherwise on a GPU: strategy and changes. The host runs `of_host`.
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{strategy} bf16": (strategy, BF16) for strategy in ALONE},
    "fsdp bf16 offload": ("fsdp", BF16 | OFFLOAD_ALL),
    "zero2 bf16 offload": ("zero2", BF16 | BF16_SUMS | {"train.offload": "optimizer"}),
    "ddp checkpointing": ("ddp", CHECKPOINTING),
    "ddp selective": ("ddp", SELECTIVE),
    "ddp activations offloaded": ("ddp", IN_HOST),
    "ddp loss in chunks": ("ddp", IN_CHUNKS),
    "ddp adapters": ("ddp", ADAPTERS),
    "ddp 4-bit base": ("ddp", NF4),
    "ddp 4-bit base bf16": ("ddp", NF4 | BF16),
    "fsdp 8-bit moments": ("fsdp", IN_8_BITS),
    "fsdp 8-bit moments bf16": ("fsdp", IN_8_BITS | BF16),
    "ddp compiled bf16": ("ddp", COMPILED | BF16),
    "ddp float8 tensorwise": ("ddp", BF16 | {"train.float8": "tensorwise"}),
    "ddp float8 rowwise": ("ddp", BF16 | {"train.float8": "rowwise"}),
}


def losses(bench: Bench) -> None:
    """In fp32, each strategy's on the device beside ddp's on the host."""
    on_host = replace(bench.worker, device=torch.device("cpu"))
    expected = alone(losses_of, case_of(TINY, "ddp", {}), TINY, on_host)
    for strategy, _ in each(bench, dict.fromkeys(ALONE), 2):
        with bench.going_on(strategy):
            found = alone(losses_of, case_of(TINY, strategy, {}), TINY, bench.worker)
            compare(bench, f"losses of {LOSS_STEPS} steps in fp32", strategy, found, expected)


def kernels(bench: Bench) -> None:
    """Each family, precision and kernel on the device, beside the same on the host."""
    on_host = replace(bench.worker, device=torch.device("cpu"))
    cases = {family: replace(case_of(TINY, "ddp", ONLINE, cached=False), family=family) for family in FAMILIES}
    cases |= {name: case_of(TINY, *case) for name, case in KERNELS.items()}
    for name, case in each(bench, cases, 2):
        with bench.going_on(name):
            found = alone(losses_of, case, TINY, bench.worker)
            expected = alone(losses_of, of_host(case), TINY, on_host)
            compare(bench, f"device and host: losses of {LOSS_STEPS} steps", name, found, expected)


def of_host(case: Case) -> Case:
    """The same numbers where there is no DeepSpeed (it takes the device), nothing compiled and nothing to offload."""
    changes = {name: value for name, value in case.changes.items() if name not in ON_DEVICE_ONLY}
    return replace(case, changes=changes, strategy="ddp" if case.strategy.startswith("zero") else case.strategy)


def compare(bench: Bench, claim: str, label: str, found: list[float], expected: list[float]) -> None:
    apart = max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))
    bench.report.figure(claim, "tiny", "largest difference", Side(label, [apart]))


def losses_of(run: TinyRun) -> list[float]:
    return [float(run.step()) for _ in range(LOSS_STEPS)]


def reads(bench: Bench) -> None:
    """Steps in which to wait for the device is an error of CUDA's."""
    cases = {f"{family}, {kind}": (family, kind) for family in FAMILIES for kind in ("cached features", "tower online")}
    for label, (family, kind) in each(bench, cases, 2):
        cached = kind == "cached features"
        case = replace(case_of(TINY, "ddp", {} if cached else ONLINE, cached=cached), family=family)
        with bench.going_on(label):
            report_wait(bench, label, alone(wait_of, case, TINY, bench.worker))
    for label, moment in each(bench, MOMENTS, len(MOMENTS)):
        with bench.going_on(label):
            case = case_of(TINY, "fsdp", IN_8_BITS)
            report_wait(bench, label, alone(partial(wait_of, resumes=moment), case, TINY, bench.worker))


def report_wait(bench: Bench, label: str, place: str | None) -> None:
    if place is None:
        return
    claim = "the host waits for the device in a step"
    bench.report.figure(claim, "tiny", "1 is yes", Side(label, [float(bool(place))]))
    if place:
        bench.report.note(f"{label}: {place}")


def wait_of(run: TinyRun, *, resumes: bool = False) -> str | None:
    """What CUDA says of the place in a step where the host waits; empty where it does not. None without a GPU.

    resumes: of a step after the state was saved and loaded.
    """
    for _ in range(WARM_UP):
        run.step()
    if resumes:
        save_and_load(run)
        run.step()
    if run.worker.device.type != "cuda":
        run.step()
        return None
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.step()
    except RuntimeError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{error} ({where.name}, line {where.lineno})"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def save_and_load(run: TinyRun) -> None:
    """As a resume: state goes through a checkpoint's files."""
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        run.strategy.snapshot(Path(scratch), dist.new_group(backend="gloo"))()
        run.strategy.load(Path(scratch))
