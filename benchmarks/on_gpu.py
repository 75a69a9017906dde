"""What only a GPU can show, by one process: losses beside the host's, steps that read nothing of the device, memory
beside the plan, tokens a second and MFU, what a checkpoint holds up. `make bench-gpu`

Without a GPU its short form (--quick) shows that it works, and measures nothing that is said of GPUs. A part that fails
says why in its notes, and the others go on: minutes on such a machine are dear.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import options
from benchmarks.measure_memory import row_batch
from benchmarks.memory_cases import ADAPTERS, BF16, CHECKPOINTING, ONLINE, Case
from benchmarks.planned_memory import fullest_parts, planned_moments
from benchmarks.predictions import Predictions
from benchmarks.report import Report, Side
from pipelines.planner.catalog import load_catalog
from pipelines.planner.layout import layout_of
from pipelines.planner.memory import device_parts
from trainer.batches import RowBatch
from trainer.flops import model_flops_per_row
from trainer.models.recompute import Recompute
from trainer.models.table import family_of
from trainer.strategies.strategy import Strategy
from trainer.strategies.table import build_strategy
from trainer.trace_rows import RowShape
from trainer.worker import Worker, start_worker

PARTS = ("losses", "reads", "memory", "speed", "checkpoint")
ALONE = ("ddp", "fsdp", "zero1", "zero2", "zero3")  # strategies that one process can run
FAMILIES = ("llava", "smolvlm", "qwen2_5_vl", "qwen3_vl")
LOSS_STEPS, WARM_UP = 5, 2
LANGUAGE, TOWER = "model.language_model.config", "model.tower.config"
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Size:
    """Of a LLaVA model, and of its rows."""

    changes: dict[str, Any]
    rows: RowShape
    vocabulary: int
    samples: int  # in a row


def _size(hidden: int, layers: int, inner: int, heads: int, *, tokens: int, images: int, samples: int) -> Size:
    tower = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    language = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner}
    heads_too = {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": tokens}
    changes = {
        **{f"{LANGUAGE}.{name}": value for name, value in (language | heads_too).items()},
        **{f"{TOWER}.{name}": value for name, value in (tower | {"patch_size": 16, "image_size": 384}).items()},
        "model.image_size": 384,
        "train.loss_chunk_tokens": 1024,
        "train.deterministic": False,
    }
    return Size(changes, RowShape(1, tokens, images, tokens // 4), 32000, samples)


TINY = Size({}, RowShape(2, 128, 4, 96), 300, 2)
MIDDLE = _size(1024, 12, 2816, 16, tokens=2048, images=2, samples=2)  # some 0.2 billion parameters
LARGE = _size(2048, 24, 5504, 16, tokens=8192, images=8, samples=8)  # 1.3 billion, as the goal says: packed at 8k

# On one process; the planner's figure for each is beside what the allocator held.
MEMORY: dict[str, tuple[str, dict[str, Any], bool]] = {
    "ddp": ("ddp", {}, True),
    "ddp bf16": ("ddp", BF16, True),
    "ddp bf16 checkpointing": ("ddp", BF16 | CHECKPOINTING, True),
    "ddp bf16 selective": ("ddp", BF16 | {"train.activation_checkpointing": "selective"}, True),
    "ddp bf16 loss at once": ("ddp", BF16 | {"train.loss_chunk_tokens": 0}, True),
    "ddp bf16 averaged": ("ddp", BF16 | {"train.ema_decay": 0.999}, True),
    "ddp bf16 online": ("ddp", BF16 | ONLINE, False),
    "ddp bf16 tower trained": ("ddp", BF16 | ONLINE | {"model.freeze": []}, False),
    "ddp adapters bf16": ("ddp", ADAPTERS | BF16, True),
    "fsdp bf16": ("fsdp", BF16, True),
    "fsdp bf16 checkpointing": ("fsdp", BF16 | CHECKPOINTING, True),
    "fsdp bf16 offload": ("fsdp", BF16 | {"train.offload": "optimizer+weights"}, True),
    "zero1 bf16": ("zero1", BF16, True),
    "zero2 bf16": ("zero2", BF16, True),
    "zero2 bf16 offload": ("zero2", BF16 | {"train.offload": "optimizer"}, True),
    "zero3 bf16": ("zero3", BF16, True),
}
SPEED: dict[str, tuple[dict[str, Any], bool]] = {
    "cached": (BF16, True),
    "cached, selective checkpointing": (BF16 | {"train.activation_checkpointing": "selective"}, True),
    "cached, full checkpointing": (BF16 | CHECKPOINTING, True),
    "tower online": (BF16 | ONLINE, False),
    "tower online, on its own stream": (BF16 | ONLINE | {"train.tower_stream": True}, False),
}


class Run:
    """A strategy of one process with a step's batches, which are the same each time."""

    def __init__(self, case: Case, size: Size, worker: Worker) -> None:
        self.job = case.config(1)
        family = family_of(self.job.model)
        with worker.device:
            model = family.skeleton(self.job.model, vocabulary=case.vocabulary)
        generator = torch.Generator().manual_seed(0)  # the host's, so that every device gets the same numbers
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.02 if parameter.ndim > 1 else None
            with torch.no_grad():
                parameter.copy_(torch.full_like(parameter, name.endswith("weight")) if drawn is None else drawn)
        module = family.training_module(self.job.model, model, cached=case.cached).train()
        Recompute.of(self.job.train).apply(family, module)
        self.strategy: Strategy = build_strategy(self.job.train, module, family.blocks(module), worker)
        batch = row_batch(self.job.model, case.rows, case.vocabulary, cached=case.cached)
        batch = packed(batch, case, size.samples)
        self.batches = [batch.pinned() if worker.device.type == "cuda" else batch] * case.passes
        self._label_tokens = case.passes * len(batch.label_ids)

    def step(self) -> torch.Tensor:
        loss = self.strategy.forward_backward(self.batches, self._label_tokens)
        self.strategy.step(1.0)
        return loss


def packed(batch: RowBatch, case: Case, samples: int) -> RowBatch:
    """Rows of so many samples each, with tokens of text and labels that differ."""
    generator = torch.Generator().manual_seed(1)
    length = -(-case.rows.tokens // samples)
    positions = (torch.arange(case.rows.tokens) % length).expand_as(batch.position_ids).contiguous()
    drawn = torch.randint(case.vocabulary - 1, batch.input_ids.shape, generator=generator)
    is_image = batch.input_ids == case.vocabulary - 1
    return replace(
        batch,
        position_ids=positions,
        input_ids=torch.where(is_image, batch.input_ids, drawn),
        label_ids=torch.randint(case.vocabulary - 1, batch.label_ids.shape, generator=generator),
        images=torch.randn(batch.images.shape, generator=generator).to(batch.images.dtype),
    )


def case_of(size: Size, strategy: str, changes: dict[str, Any], *, cached: bool = True, passes: int = 2) -> Case:
    return Case(strategy, size.changes | changes, passes, cached, size.rows, size.vocabulary)


@contextlib.contextmanager
def emptied(worker: Worker) -> Iterator[None]:
    """Before and after, the device holds nothing of another run."""
    for _ in range(2):
        gc.collect()
        if worker.device.type == "cuda":
            torch.cuda.empty_cache()
        if _ == 0:
            yield


def wait(worker: Worker) -> None:
    if worker.device.type == "cuda":
        torch.cuda.synchronize()


def losses(report: Report, worker: Worker, *, quick: bool) -> None:
    """In fp32, each strategy's on the device beside ddp's on the host."""
    on_host = replace(worker, device=torch.device("cpu"))
    run = Run(case_of(TINY, "ddp", {}), TINY, on_host)
    expected = [float(run.step()) for _ in range(LOSS_STEPS)]
    for strategy in ALONE[: 2 if quick else None]:
        with emptied(worker):
            run = Run(case_of(TINY, strategy, {}), TINY, worker)
            found = [float(run.step()) for _ in range(LOSS_STEPS)]
            apart = max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))
            report.figure(
                f"losses of {LOSS_STEPS} steps in fp32", "tiny", "largest difference", Side(strategy, [apart])
            )


def reads(report: Report, worker: Worker, *, quick: bool) -> None:
    """Steps in which to wait for the device is an error of CUDA's."""
    for family in FAMILIES[: 1 if quick else None]:
        for cached in (True, False):
            case = replace(case_of(TINY, "ddp", {} if cached else ONLINE, cached=cached), family=family)
            with emptied(worker):
                run = Run(case, TINY, worker)
                for _ in range(WARM_UP):
                    run.step()
                if worker.device.type != "cuda":
                    run.step()
                    continue
                waits = 0.0
                torch.cuda.set_sync_debug_mode("error")
                try:
                    run.step()
                except RuntimeError as error:
                    waits = 1.0
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    report.notes.append(f"{family}, cached {cached}: {error} ({where.name}, line {where.lineno})")
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            label = f"{family}, {'cached features' if cached else 'tower online'}"
            report.figure("the host waits for the device in a step", "tiny", "1 is yes", Side(label, [waits]))


def memory(found: Predictions, worker: Worker, *, quick: bool) -> None:
    """The fullest moment of a step: what the plan says torch allocates, and what it says the device holds."""
    size, on_gpu = (TINY if quick else MIDDLE), worker.device.type == "cuda"
    for name, (strategy, changes, cached) in list(MEMORY.items())[: 2 if quick else None]:
        case = case_of(size, strategy, changes, cached=cached)
        with emptied(worker):
            run = Run(case, size, worker)
            for _ in range(WARM_UP):
                run.step()
            wait(worker)
            parts = fullest_parts(planned_moments(case, 1, on_gpu=True))
            if not on_gpu:
                continue
            torch.cuda.reset_peak_memory_stats()
            run.step()
            wait(worker)
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            free, whole = torch.cuda.mem_get_info()
            beside = device_parts(parts, layout_of(case.config(1)))
            allocates = sum(part.bytes for part in parts)
            holds = allocates + sum(part.bytes for part in beside)
            found.add("peak that torch allocates", name, "MiB", allocates / MIB, allocated / MIB)
            context = whole - free - torch.cuda.memory_reserved()  # CUDA's own and libraries', of all processes
            found.add("peak of the device", name, "MiB", holds / MIB, (reserved + context) / MIB)


def speed(report: Report, worker: Worker, *, quick: bool) -> None:
    """Useful tokens a second and MFU of a whole step, of `ddp`."""
    size, steps = (TINY, 2) if quick else (LARGE, 8)
    peak = peak_flops()
    for name, (changes, cached) in list(SPEED.items())[: 1 if quick else None]:
        case = case_of(size, "ddp", changes, cached=cached)
        with emptied(worker):
            run = Run(case, size, worker)
            for _ in range(WARM_UP):
                run.step()
            times_s = []
            for _ in range(steps):
                wait(worker)
                started_s = time.perf_counter()
                run.step()
                wait(worker)
                times_s.append(time.perf_counter() - started_s)
            shape = family_of(run.job.model).shape(run.job.model)
        rows, tokens = case.passes * size.rows.rows, case.passes * size.rows.rows * size.rows.tokens
        useful = rows * model_flops_per_row(
            shape,
            useful_tokens=size.rows.tokens,
            samples=size.samples,
            images=size.rows.images / size.rows.rows,
            label_tokens=size.rows.label_tokens / size.rows.rows,
            cached=cached,
        )
        report.figure("useful tokens", name, "1 / s", Side("ddp", [tokens / one_s for one_s in times_s]))
        if peak:
            report.figure("MFU", name, "%", Side("ddp", [100 * useful / one_s / peak for one_s in times_s]))


def peak_flops() -> float:
    """Of this GPU in bf16, as the catalogue has it; 0 where it is not known."""
    if not torch.cuda.is_available():
        return 0.0
    name = torch.cuda.get_device_name()
    for gpu in load_catalog().gpus.values():
        kind = gpu.accelerator_type.removeprefix("NVIDIA_").removeprefix("TESLA_").split("_")[0]
        if kind in name.replace("-", " ").split() and gpu.bf16_tflops:
            return gpu.bf16_tflops * 1e12
    return 0.0


def checkpoint(report: Report, worker: Worker, *, quick: bool) -> None:
    """What a snapshot holds training up, and how long its writing takes behind it. The first makes its buffers."""
    size, group = (TINY if quick else LARGE), dist.new_group(backend="gloo")
    for strategy in ("ddp", "fsdp", "zero2")[: 1 if quick else None]:
        held_s, written_s = [], []
        with emptied(worker), tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
            run = Run(case_of(size, strategy, BF16), size, worker)
            for number in range(3):
                run.step()
                wait(worker)
                folder = Path(scratch, str(number))
                folder.mkdir()
                started_s = time.perf_counter()
                write = run.strategy.snapshot(folder, group)
                held_s.append(time.perf_counter() - started_s)
                write()
                written_s.append(time.perf_counter() - started_s - held_s[-1])
                saved = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                shutil.rmtree(folder)  # disks there are small
        report.figure("training held up, first snapshot", strategy, "s", Side(f"{saved / GIB:.2f} GiB", held_s[:1]))
        report.figure("training held up, later ones", strategy, "s", Side(f"{saved / GIB:.2f} GiB", held_s[1:]))
        rate = saved / statistics.median(written_s) / 1e9
        report.figure("written behind training", strategy, "GB/s", Side(f"{saved / GIB:.2f} GiB", [rate]))


def main() -> None:
    chosen = options(__doc__, PARTS)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not chosen.quick:
        raise SystemExit("no GPU here: --quick shows that this works, on the processor")
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
    device = torch.cuda.get_device_name() if on_gpu else "none: a processor, so that no figure here is a GPU's"
    worker = start_worker()
    report = Report("One GPU", {"GPU": device})
    plans = Predictions("Memory of one GPU, predicted and measured", {"GPU": device})
    for part in chosen.only:
        try:
            if part == "memory":
                memory(plans, worker, quick=chosen.quick)
            else:
                globals()[part](report, worker, quick=chosen.quick)
        except Exception as error:  # what the other parts find is worth having
            if not on_gpu:
                raise
            report.notes.append(f"{part} ended early: {error!r}\n{traceback.format_exc()}")
    report.publish(chosen)
    if plans.rows:
        for name in ("json", "markdown"):
            file = getattr(chosen, name)
            setattr(chosen, name, file and file.with_stem(f"{file.stem}-memory"))
        plans.publish(chosen)


if __name__ == "__main__":
    main()
