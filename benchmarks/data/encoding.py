"""Part `encoding`: the wall time of the encoding job's four parts together, beside the sum of each part alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.data.preparing import QWEN, photographs
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from tests.support.trainer.flop_cases import model_config
from vlmpipe.trainer.config.job import FeaturesConfig
from vlmpipe.trainer.feature_cache.encode import ShardWriter, batches_of, encode_batches, one_behind
from vlmpipe.trainer.feature_cache.store import write_shard
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.storage.local import LocalStorage

SIDE, BATCH, SHARD = 512, 4, 8  # pixels; images of a batch and of a shard
STORE_S = 0.02  # that a bucket takes to answer a read, which no processor's time is spent in
CPU = torch.device("cpu")


def encoding(bench: Bench) -> None:
    """Images of a quarter of a megapixel, a small tower in one thread, and reads that take as long as a bucket's."""
    count = SHARD if bench.quick else 4 * SHARD
    images = {f"{number:064x}": data for number, data in enumerate(photographs(SIDE, count))}
    job: Any = _Job()
    tower = family_of(job.model).build_tower(job.model)
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-", dir=bench.scratch) as folder, torch.no_grad():
        parts = Parts(job, tower, images, LocalStorage(Path(folder, "store")), Path(folder))
        timed = {
            "together": parts.together,
            **{part: getattr(parts, part) for part in ("read", "prepare", "encode", "write")},
        }
        found = bench.take_turns("encoding", {name: _seconds(work) for name, work in timed.items()})
    data = f"{count} images of {SIDE} x {SIDE}, one torch thread"
    alone = [
        sum(found[name][number] for name in timed if name != "together") for number in range(len(found["together"]))
    ]
    rates = [[count / s for s in seconds] for seconds in (found["together"], alone)]
    bench.report.compare(
        "encoding job",
        data,
        "images / s of wall time",
        Side("overlapped", rates[0]),
        Side("its parts in turn", rates[1]),
    )


class _Job:
    """What encoding looks at in a `JobConfig`."""

    model = model_config(**QWEN)
    features = FeaturesConfig(batch_images=BATCH, shard_images=SHARD)


class Parts:
    """The four parts of the job: each by itself, as the job does it, and all of them together."""

    def __init__(self, job: Any, tower: Any, images: dict[str, bytes], store: LocalStorage, folder: Path) -> None:
        self._job, self._tower, self._images, self._store, self._folder = job, tower, images, store, folder
        self._prepare = image_preparer(job.model)
        self._batches = [list(batch) for batch in batches_of(job, list(images))]
        self._pixels = [self._prepare([images[name] for name in batch]) for batch in self._batches]
        self._features = self._encoded()

    def together(self) -> None:
        features: dict[str, torch.Tensor] = {}
        with ShardWriter(self._write) as writer:
            for made in one_behind(encode_batches(self._job, self._tower, self._batches, self._read, CPU)):
                features |= made
                if len(features) == SHARD:
                    writer.submit(features)
                    features = {}

    def read(self) -> None:
        for batch in self._batches:
            list(map(self._read, batch))

    def prepare(self) -> None:
        for batch in self._batches:
            self._prepare([self._images[name] for name in batch])

    def encode(self) -> None:
        self._encoded()

    def write(self) -> None:
        names = list(self._features)
        for start in range(0, len(names), SHARD):
            self._write({name: self._features[name] for name in names[start : start + SHARD]})

    def _read(self, name: str) -> bytes:
        time.sleep(STORE_S)
        return self._images[name]

    def _encoded(self) -> dict[str, torch.Tensor]:
        family, found = family_of(self._job.model), dict[str, torch.Tensor]()
        for batch, pixels in zip(self._batches, self._pixels, strict=True):
            outputs = family.encode(self._job.model, self._tower, pixels.values, pixels.grids)
            found |= dict(zip(batch, outputs, strict=True))
        return found

    def _write(self, features: dict[str, torch.Tensor]) -> None:
        write_shard(self._store, self._folder, features, tower_sha256="none")


def _seconds(work: Callable[[], None]) -> Callable[[], float]:
    def timed() -> float:
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s

    return timed
