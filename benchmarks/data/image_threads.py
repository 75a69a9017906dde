"""Parts `hf-threads` and `loading`: images in several threads beside one.

The first is of family hf, which the library's processor prepares; the second is a rank's whole loader by
data.loader_threads, with one and with eight images in a micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.data.preparing import COUNT, MAX_PIXELS, MODELS, SIDES, counted, photographs
from benchmarks.support.suite import Bench
from tests.support.hf.publish import publish
from tests.support.trainer.flop_cases import model_config
from tests.support.trainer.packed_rows import row
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.data.chat.encode import IGNORED
from vlmpipe.trainer.data.loader import PackedSequence
from vlmpipe.trainer.data.sampler import GlobalBatch
from vlmpipe.trainer.dataloading.batches import online_images
from vlmpipe.trainer.dataloading.prefetching_loader import PrefetchingLoader
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.models.hf.processor import published_images
from vlmpipe.trainer.models.image_processor import image_preparer, published_inputs
from vlmpipe.trainer.models.image_threads import use_threads

STEPS = 16
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"size": {"shortest_edge": 56 * 56, "longest_edge": MAX_PIXELS}, "patch_size": 14, "merge_size": 2},
    "gemma3": {"size": {"height": 896, "width": 896}},
}


def hf_threads(bench: Bench) -> None:
    """By CPU time, which a second thread must not raise, and by wall time."""
    sides, kinds = (SIDES[:1], ["gemma3"]) if bench.quick else (SIDES, list(PROCESSORS))
    bench.expect(len(sides) * len(kinds))
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        for kind in kinds:
            weights = WeightsConfig(weights=str(publish(kind, Path(scratch, kind))))
            prepare = functools.partial(published_inputs, published_images(weights, PROCESSORS[kind]))
            for side in sides:
                data, found = f"{side} x {side} JPEG", photographs(side, 2 if bench.quick else COUNT)
                works = {name: counted(prepare, found, threads=threads) for name, threads in (("one", 1), ("two", 2))}
                times = bench.take_timed_turns(f"{kind}, {data}", works)
                two, one = ("two threads", times["two"]), ("one thread", times["one"])
                bench.report.compare_rates(f"family hf: images of {kind}", data, "images", two, one)


class Photos:
    """Stands in for PackedLoader and its sampler: steps of one sequence with these images."""

    def __init__(self, images: list[bytes]) -> None:
        self.images, self.sampler = images, self

    def batch(self, step: int) -> GlobalBatch:
        return GlobalBatch(epoch=0, start=step, stop=step + 1, sequences_consumed=step)

    def label_tokens(self, _batch: GlobalBatch) -> int:
        return 1

    def loss_terms(self, _batch: GlobalBatch) -> int:
        return 1

    def read_step(self, _step: int, _rank: int, _world_size: int) -> Iterator[PackedSequence]:
        made = row([IGNORED, 1] + [IGNORED] * 6, images=len(self.images))
        yield dataclasses.replace(made, images=tuple(self.images))


def loading(bench: Bench) -> None:
    """Images a CPU second, which threads must not lower, and a second of wall time, which they should raise."""
    side = SIDES[0] if bench.quick else SIDES[1]
    counts = (1, 8)
    bench.expect(len(counts))
    for count in counts:
        data = f"{count} of {side} x {side} JPEG in a micro-batch"
        images = photographs(side, count)
        works = {f"{threads}": loaded(images, threads) for threads in (1, 2, 4)}
        times = bench.take_timed_turns(data, works)
        for threads in ("2", "4"):
            many, one = (f"{threads} threads", times[threads]), ("one thread", times["1"])
            bench.report.compare_rates(f"images loaded by {threads} threads", data, "images", many, one)


def loaded(images: list[bytes], threads: int) -> Callable[[], int]:
    """Loading some steps, as training takes them: the pixel values of Qwen's patches."""
    source = online_images(image_preparer(model_config(**MODELS["qwen2_5_vl"])))
    replica = DataParallelRank(index=0, count=1, leads=True, takes_images=True)
    steps = max(2, STEPS // len(images))

    def work() -> int:
        use_threads(threads)
        loader: Any = Photos(images)
        stream = PrefetchingLoader(
            loader,
            source,
            micro_batch_size=1,
            first_step=0,
            end_step=steps,
            replica=replica,
            device=torch.device("cpu"),
        )
        for data in stream:
            for _ in data.batches:
                pass
        stream.close()
        return steps * len(images)

    return work
