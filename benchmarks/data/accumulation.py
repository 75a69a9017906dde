"""Part `accumulation`: memory of the host while micro-batches with images wait, by micro-batches a step."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.data.preparing import QWEN, photographs
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from tests.support.trainer.flop_cases import model_config
from tests.support.trainer.packed_rows import ROW_TOKENS, row
from vlmpipe.trainer.data.chat.encode import IGNORED
from vlmpipe.trainer.data.loader import PackedSequence
from vlmpipe.trainer.data.sampler import GlobalBatch
from vlmpipe.trainer.dataloading.prefetching_loader import PrefetchingLoader
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.models.image_processor import image_preparer

MIB = 1 << 20
AHEAD_BYTES = 128 * MIB  # that may wait, in place of a job's 1 GiB
MICRO_BATCHES = (8, 32, 128)  # of one sequence, in a step
IMAGES = 2  # of a sequence, of a megapixel: 24 MiB each
SETTLED_S = 0.5  # for which the first micro-batch is not taken


def accumulation(bench: Bench) -> None:
    """The process's peak while a step is read, above what it held before; and the pixel values of that step."""
    counts = MICRO_BATCHES[:2] if bench.quick else MICRO_BATCHES
    encoded, prepare = photographs(1024, IMAGES), image_preparer(model_config(**QWEN))
    sides = {str(count): partial(peak_mib, count, lambda _rows: prepare(encoded)) for count in counts}
    for name, pairs in bench.take_turns("memory by micro-batches", sides).items():
        data = f"{name} micro-batches a step, of {IMAGES} images of a megapixel"
        peaks, pixels = ([pair[index] for pair in pairs] for index in range(2))
        bench.report.figure("peak of the host's memory above its start", data, "MiB", Side("bounded queue", peaks))
        bench.report.figure("pixel values of a step", data, "MiB", Side("all", pixels))
    bench.report.note(f"At most {AHEAD_BYTES // MIB} MiB may wait; one more micro-batch is being made, one is in use.")


class Steps:
    """Stands in for PackedLoader and its sampler: one step of `count` equal sequences."""

    def __init__(self, count: int) -> None:
        self._count, self.sampler = count, self

    def batch(self, _step: int) -> GlobalBatch:
        return GlobalBatch(epoch=0, start=0, stop=self._count, sequences_consumed=0)

    def label_tokens(self, batch: GlobalBatch) -> int:
        return len(batch)

    def loss_terms(self, batch: GlobalBatch) -> int:
        return len(batch)

    def read_step(self, _step: int, _rank: int, _world_size: int) -> Iterator[PackedSequence]:
        return (row([IGNORED] * (ROW_TOKENS - 1) + [1], images=IMAGES) for _ in range(self._count))


def peak_mib(count: int, source: Any) -> tuple[float, float]:
    """Peak of this process above where it began, and the bytes of a step's images, in MiB."""
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins again at VmRSS
    stream = PrefetchingLoader(
        Steps(count),  # type: ignore[arg-type]
        source,
        micro_batch_size=1,
        first_step=0,
        end_step=1,
        replica=DataParallelRank(index=0, count=1, leads=True, takes_images=True),
        device=torch.device("cpu"),
        ahead_bytes=AHEAD_BYTES,
    )
    pixel_bytes = 0
    for data in stream:
        time.sleep(SETTLED_S)
        for batch in data.batches:
            assert isinstance(batch.images, torch.Tensor)
            pixel_bytes += batch.images.untyped_storage().nbytes()
    stream.close()
    return (resident_bytes("VmHWM") - before) / MIB, pixel_bytes / MIB


def resident_bytes(name: str) -> int:
    """Resident memory of this process, by the kernel's name of the figure."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found
    return int(found[1]) << 10
