"""Part `speed` of `benchmarks.on_gpu`: useful tokens a second and MFU of whole steps."""

from __future__ import annotations

import itertools
import re
import time
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.run import LARGE, TINY, WARM_UP, alone, case_of, each, wait
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.tiny_run import TinyRun
from tests.support.trainer.memory_cases import BF16, CHECKPOINTING, IN_HOST, ONLINE, SELECTIVE
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.flops import model_flops_per_sequence

NO_KIND = re.compile(r"NVIDIA|TESLA|MEGA|\d+GB")  # parts of an accelerator's type that do not decide its rate
SLOWER_NAMESAKES = {("H100", "PCIE"), ("H100", "NVL"), ("H200", "NVL")}
COMPILED: dict[str, Any] = BF16 | {"train.compile": "on"}

# Strategy, changes, whether features are cached.
SPEED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "cached": ("ddp", BF16, True),
    "cached, compiled": ("ddp", COMPILED, True),
    "cached, compiled, float8 tensorwise": ("ddp", COMPILED | {"train.float8": "tensorwise"}, True),
    "cached, compiled, float8 rowwise": ("ddp", COMPILED | {"train.float8": "rowwise"}, True),
    "cached, selective checkpointing": ("ddp", BF16 | SELECTIVE, True),
    "cached, full checkpointing": ("ddp", BF16 | CHECKPOINTING, True),
    "cached, activations offloaded": ("ddp", BF16 | IN_HOST, True),
    "tower online": ("ddp", BF16 | ONLINE, False),
    "cached, one shard": ("fsdp", BF16, True),
    "cached, one partition": ("zero2", BF16, True),
}


def speed(bench: Bench) -> None:
    """Useful tokens a second and MFU of a whole step, and how long the first takes, which compiles."""
    size, steps = (TINY, 2) if bench.quick else (LARGE, 6)
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    for name, (strategy, changes, cached) in each(bench, SPEED, 1):
        case = case_of(size, strategy, changes, cached=cached)
        with bench.going_on(name):
            first_s, *times_s = alone(partial(step_times_s, steps=steps), case, size, bench.worker)
            sequences, tokens = case.passes * size.rows.sequences, case.passes * size.rows.sequences * size.rows.tokens
            model = case.config(1).model
            useful = sequences * model_flops_per_sequence(
                family_of(model).shape(model),
                useful_tokens=size.rows.tokens,
                samples=size.samples,
                images=size.rows.images / size.rows.sequences,
                label_tokens=size.rows.label_tokens / size.rows.sequences,
                cached=cached,
            )
            figure = bench.report.figure
            figure("first step", name, "s", Side(strategy, [first_s]))
            figure("useful tokens", name, "1 / s", Side(strategy, [tokens / one_s for one_s in times_s]))
            if peak:
                figure("MFU", name, "%", Side(strategy, [100 * useful / one_s / peak for one_s in times_s]))


def step_times_s(run: TinyRun, *, steps: int) -> list[float]:
    """Of the first step, and of `steps` after the warm-up."""
    first_s, *others_s = [_timed_s(run) for _ in range(WARM_UP + steps)]
    return [first_s, *others_s[-steps:]]


def _timed_s(run: TinyRun) -> float:
    wait(run.worker)
    started_s = time.perf_counter()
    run.step()
    wait(run.worker)
    return time.perf_counter() - started_s


def peak_flops(name: str) -> float | None:
    """Of the GPU that torch calls so, in bf16, as the catalogue has it; None where it has none: an MFU by another GPU's
    peak would be wrong. It has those of machines to rent, than which an H100 or H200 on a card is slower."""
    words = name.upper().replace("-", " ").split()
    if "MIG" in words or SLOWER_NAMESAKES & set(itertools.pairwise(words)):
        return None
    for gpu in load_catalog().gpus.values():
        kind = {word for word in gpu.accelerator_type.split("_") if not NO_KIND.fullmatch(word)}
        if kind <= set(words) and gpu.bf16_tflops:
            return gpu.bf16_tflops * 1e12
    return None
