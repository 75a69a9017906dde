"""Parts of `benchmarks.on_gpu`: what only a GPU can show, by one process."""

from __future__ import annotations

import itertools
import re
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.gpu.run import LARGE, MIDDLE, TINY, alone, case_of, wait
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.tiny_run import TinyRun
from benchmarks.training.attention import QUICK, Attention, Packed, results, sides
from tests.support.planner.planned_memory import fullest_parts, planned_phases
from tests.support.trainer.memory_cases import ADAPTERS, BF16, CHECKPOINTING, IN_HOST, ONLINE, SELECTIVE
from trainer.distributed.process import ProcessContext
from trainer.models.attention.kernels import BLOCKWISE, CPU, FLASH, kernel_for
from trainer.models.registry import family_of
from trainer.sizing.flops import model_flops_per_sequence
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.planner.memory.rank import device_parts
from vlmpipe.planner.parallel_layout import layout_of

ALONE = ("ddp", "fsdp", "zero1", "zero2", "zero3")  # strategies that one process can run
FAMILIES = ("llava", "smolvlm", "qwen2_5_vl", "qwen3_vl")
LOSS_STEPS, WARM_UP, ATTENTION_PASSES, SNAPSHOTS = 5, 2, 5, 3
MIB, GIB = 1 << 20, 1 << 30
NO_KIND = re.compile(r"NVIDIA|TESLA|MEGA|\d+GB")  # parts of an accelerator's type that do not decide its rate
SLOWER_NAMESAKES = {("H100", "PCIE"), ("H100", "NVL"), ("H200", "NVL")}
OFFLOAD_ALL: dict[str, Any] = {"train.offload": "optimizer+weights"}
One = TypeVar("One")

# On one process: strategy, changes, whether features are cached. The planner's figure is beside the allocator's.
MEMORY: dict[str, tuple[str, dict[str, Any], bool]] = {
    "ddp": ("ddp", {}, True),
    "ddp bf16": ("ddp", BF16, True),
    "ddp bf16 checkpointing": ("ddp", BF16 | CHECKPOINTING, True),
    "ddp bf16 selective": ("ddp", BF16 | SELECTIVE, True),
    "ddp bf16 activations offloaded": ("ddp", BF16 | IN_HOST, True),
    "ddp bf16 loss at once": ("ddp", BF16 | {"train.loss_chunk_tokens": 0}, True),
    "ddp bf16 averaged": ("ddp", BF16 | {"train.ema_decay": 0.999}, True),
    "ddp bf16 online": ("ddp", BF16 | ONLINE, False),
    "ddp bf16 tower trained": ("ddp", BF16 | ONLINE | {"model.freeze": []}, False),
    "ddp adapters bf16": ("ddp", ADAPTERS | BF16, True),
    "fsdp bf16": ("fsdp", BF16, True),
    "fsdp bf16 checkpointing": ("fsdp", BF16 | CHECKPOINTING, True),
    "fsdp bf16 offload": ("fsdp", BF16 | OFFLOAD_ALL, True),
    "zero1 bf16": ("zero1", BF16, True),
    "zero2 bf16": ("zero2", BF16, True),
    "zero2 bf16 offload": ("zero2", BF16 | {"train.offload": "optimizer"}, True),
    "zero3 bf16": ("zero3", BF16, True),
    "zero3 bf16 selective": ("zero3", BF16 | SELECTIVE, True),
}
SPEED: dict[str, tuple[dict[str, Any], bool]] = {
    "cached": (BF16, True),
    "cached, selective checkpointing": (BF16 | SELECTIVE, True),
    "cached, full checkpointing": (BF16 | CHECKPOINTING, True),
    "cached, activations offloaded": (BF16 | IN_HOST, True),
    "tower online": (BF16 | ONLINE, False),
    "tower online, on its own stream": (BF16 | ONLINE | {"train.overlap_vision_encoder": True}, False),
}


def each(bench: Bench, cases: Mapping[str, One], quick: int) -> Iterator[tuple[str, One]]:
    """One case after another, as far as the time allows; of the short form the first `quick`."""
    names = list(cases)[: quick if bench.quick else None]
    for name in bench.cases("cases", names):
        yield name, cases[name]


def losses(bench: Bench) -> None:
    """In fp32, each strategy's on the device beside ddp's on the host."""
    on_host = replace(bench.worker, device=torch.device("cpu"))
    expected = alone(losses_of, case_of(TINY, "ddp", {}), TINY, on_host)
    for strategy, _ in each(bench, dict.fromkeys(ALONE), 2):
        found = alone(losses_of, case_of(TINY, strategy, {}), TINY, bench.worker)
        apart = max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))
        claim = f"losses of {LOSS_STEPS} steps in fp32"
        bench.report.figure(claim, "tiny", "largest difference", Side(strategy, [apart]))


def losses_of(run: TinyRun) -> list[float]:
    return [float(run.step()) for _ in range(LOSS_STEPS)]


def reads(bench: Bench) -> None:
    """Steps in which to wait for the device is an error of CUDA's."""
    cases = {f"{family}, {kind}": (family, kind) for family in FAMILIES for kind in ("cached features", "tower online")}
    for label, (family, kind) in each(bench, cases, 2):
        cached = kind == "cached features"
        case = replace(case_of(TINY, "ddp", {} if cached else ONLINE, cached=cached), family=family)
        place = alone(wait_of, case, TINY, bench.worker)
        if place is None:
            continue
        claim = "the host waits for the device in a step"
        bench.report.figure(claim, "tiny", "1 is yes", Side(label, [float(bool(place))]))
        if place:
            bench.report.note(f"{label}: {place}")


def wait_of(run: TinyRun) -> str | None:
    """What CUDA says of the place in a step where the host waits; empty where it does not. None without a GPU."""
    for _ in range(WARM_UP):
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


def memory(bench: Bench) -> None:
    """The fullest phase of a step: what the plan says torch allocates, and what it says the device holds."""
    size = TINY if bench.quick else MIDDLE
    for name, (strategy, changes, cached) in each(bench, MEMORY, 2):
        case = case_of(size, strategy, changes, cached=cached)
        parts = fullest_parts(planned_phases(case, 1, on_gpu=True))
        beside = device_parts(parts, layout_of(case.config(1)))
        measured = alone(peaks_of, case, size, bench.worker)
        if measured is None:
            continue
        allocates = sum(part.bytes for part in parts)
        holds = allocates + sum(part.bytes for part in beside)
        predict = bench.report.predict
        predict("peak that torch allocates", name, "MiB", allocates / MIB, measured.allocated_bytes / MIB)
        predict("peak of the device", name, "MiB", holds / MIB, measured.held_bytes / MIB)


@dataclass(frozen=True)
class Peaks:
    """Of a step: what torch allocated, and what the device held with what torch keeps free and CUDA takes."""

    allocated_bytes: int
    held_bytes: int


def peaks_of(run: TinyRun) -> Peaks | None:
    """None without a GPU."""
    for _ in range(WARM_UP):
        run.step()
    if run.worker.device.type != "cuda":
        return None
    wait(run.worker)
    torch.cuda.reset_peak_memory_stats()
    run.step()
    wait(run.worker)
    free, whole = torch.cuda.mem_get_info()
    context = whole - free - torch.cuda.memory_reserved()  # CUDA's own and libraries', of all processes
    return Peaks(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved() + context)


def attention(bench: Bench) -> None:
    """Of packed sequences, with gradients: by sample, or under a mask; by the kernel that the trainer would choose."""
    device = bench.worker.device
    sequences = QUICK if bench.quick else (Packed(8192, 30, heads=16, head_dim=128), Packed(8192, 8, heads=32))
    cases = list(itertools.product(sequences, (torch.bfloat16, torch.float32)))
    bench.expect(len(cases))
    for packed, dtype in cases:
        both = sides(packed, device, dtype)
        query, key, _ = both["by sample"].inputs
        kernels = {CPU: "by sample", FLASH: "all samples at once", BLOCKWISE: "in plain products"}
        timed = {name: partial(passes_per_s, side, bench.worker) for name, side in both.items()}
        data = f"{packed.text()}, {dtype}"
        found = bench.take_turns(data, timed)
        ours = Side(kernels[kernel_for(query, key)], found["by sample"])
        masked = Side("under a mask", found["under a mask"])
        bench.report.compare("attention: forward and backward", data, "1 / s", ours, masked)


def passes_per_s(side: Attention, worker: ProcessContext) -> float:
    wait(worker)
    started_s = time.perf_counter()
    for _ in range(ATTENTION_PASSES):
        results(side)
    wait(worker)
    return ATTENTION_PASSES / (time.perf_counter() - started_s)


def speed(bench: Bench) -> None:
    """Useful tokens a second and MFU of a whole step, of `ddp`."""
    size, steps = (TINY, 2) if bench.quick else (LARGE, 8)
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    for name, (changes, cached) in each(bench, SPEED, 1):
        case = case_of(size, "ddp", changes, cached=cached)
        times_s = alone(partial(step_times_s, steps=steps), case, size, bench.worker)
        sequences, tokens = case.passes * size.rows.rows, case.passes * size.rows.rows * size.rows.tokens
        model = case.config(1).model
        useful = sequences * model_flops_per_sequence(
            family_of(model).shape(model),
            useful_tokens=size.rows.tokens,
            samples=size.samples,
            images=size.rows.images / size.rows.rows,
            label_tokens=size.rows.label_tokens / size.rows.rows,
            cached=cached,
        )
        bench.report.figure("useful tokens", name, "1 / s", Side("ddp", [tokens / one_s for one_s in times_s]))
        if peak:
            bench.report.figure("MFU", name, "%", Side("ddp", [100 * useful / one_s / peak for one_s in times_s]))


def step_times_s(run: TinyRun, *, steps: int) -> list[float]:
    for _ in range(WARM_UP):
        run.step()
    times_s = []
    for _ in range(steps):
        wait(run.worker)
        started_s = time.perf_counter()
        run.step()
        wait(run.worker)
        times_s.append(time.perf_counter() - started_s)
    return times_s


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


def checkpoint(bench: Bench) -> None:
    """How long a snapshot holds training up, and how long its writing takes behind it. The first makes its buffers."""
    size, group = (TINY if bench.quick else LARGE), dist.new_group(backend="gloo")
    for strategy, _ in each(bench, dict.fromkeys(("ddp", "fsdp", "zero2")), 1):
        case = case_of(size, strategy, BF16)
        found = alone(partial(snapshots_of, group=group), case, size, bench.worker)
        label = f"{found.saved_bytes / GIB:.2f} GiB"
        bench.report.figure("training held up, first snapshot", strategy, "s", Side(label, found.held_s[:1]))
        bench.report.figure("training held up, later ones", strategy, "s", Side(label, found.held_s[1:]))
        rate = found.saved_bytes / statistics.median(found.written_s) / 1e9
        bench.report.figure("written behind training", strategy, "GB/s", Side(label, [rate]))


@dataclass(frozen=True)
class Snapshots:
    saved_bytes: int
    held_s: list[float]
    written_s: list[float]


def snapshots_of(run: TinyRun, *, group: dist.ProcessGroup) -> Snapshots:
    held_s, written_s, saved_bytes = [], [], 0
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        for number in range(SNAPSHOTS):
            run.step()
            wait(run.worker)
            folder = Path(scratch, str(number))
            folder.mkdir()
            started_s = time.perf_counter()
            write = run.strategy.snapshot(folder, group)
            held_s.append(time.perf_counter() - started_s)
            write()
            written_s.append(time.perf_counter() - started_s - held_s[-1])
            saved_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder)  # disks there are small
    return Snapshots(saved_bytes, held_s, written_s)
