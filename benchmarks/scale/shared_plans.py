"""Part `shared-plans`: CPU time and private memory of ranks that plan epochs, each by itself and once a machine."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist

from benchmarks.scale.private_memory import private_mib
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.sampler import PackedBatchSampler

SAMPLES, RANKS, EPOCHS, SHARD_SAMPLES = 2_000_000, 2, 4, 1_000
COLUMNS = ("tokens", "images", "shards")


@dataclass(frozen=True)
class Split:
    """What a sampler takes of a split, mapped as the index maps it."""

    tokens: np.ndarray
    images: np.ndarray
    shard_numbers: np.ndarray
    name: str = "train"

    def __len__(self) -> int:
        return len(self.tokens)

    def shown(self) -> np.ndarray:
        return self.images


def shared_plans(bench: Bench) -> None:
    """Ranks count the steps of four epochs and hold the first epoch's plan."""
    samples = SAMPLES // (100 if bench.quick else 1)
    random = np.random.default_rng(0)
    columns = (random.integers(50, 900, samples), np.ones(samples), np.arange(samples) // SHARD_SAMPLES)
    for name, column in zip(COLUMNS, columns, strict=True):
        np.save(bench.scratch / f"{name}.npy", column.astype(np.int32))
    data = f"{samples:,} samples, {EPOCHS} epochs, each of {RANKS} processes"
    found = {}
    for side, share_from in (("shared", 1), ("each by itself", None)):
        arguments = {"folder": str(bench.scratch), "share_from": share_from}
        found[side] = bench.call(f"{__name__}:planned", arguments, ranks=RANKS)
    shared, own = found.values()
    bench.report.require(shared["steps"] == own["steps"], "shared plans give the same number of steps")
    for claim, unit, name in (("time to plan", "CPU s", "cpu_s"), ("private memory", "MiB", "private_mib")):
        for side, values in found.items():
            bench.report.figure(f"{claim}, {side}", data, unit, Side(side, values[name]))


def planned(folder: str, share_from: int | None) -> dict[str, Any]:
    """CPU seconds and private memory of every rank."""
    (Path(folder) / "cache").mkdir(mode=0o700, exist_ok=True)
    os.environ["VLMPIPE_CACHE_DIR"] = str(Path(folder) / "cache")
    tokens, images, shards = (np.load(Path(folder, f"{name}.npy"), mmap_mode="r") for name in COLUMNS)
    dist.init_process_group("gloo")
    config = DataConfig(source="unused.json", sequence_length=2048, max_images_per_sequence=16)
    before, began = private_mib(), time.process_time()
    split = cast(Any, Split(tokens, images, shards))
    sampler = PackedBatchSampler(split, config, seed=0, global_batch_size=256, share_from=share_from)
    steps = sampler.num_steps(EPOCHS)
    sampler.plan(0)
    own = {"cpu_s": time.process_time() - began, "private_mib": private_mib() - before}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    dist.destroy_process_group()
    return {"steps": steps} | {name: [rank[name] for rank in ranks] for name in own}
