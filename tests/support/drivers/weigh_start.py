"""Build the strategies of run files and print what each rank held and read meanwhile, as JSON.

torchrun ... -m tests.support.drivers.weigh_start --configs runs/a/run.json runs/b/run.json
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.trainer.measure_memory import Scales
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.data_parallel_rank import replica_of
from vlmpipe.trainer.distributed.process import run_worker, start_worker
from vlmpipe.trainer.models.hf_native import weight_files
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.setup.data import open_data
from vlmpipe.trainer.setup.model import build_model
from vlmpipe.trainer.setup.open_run import OpenRun
from vlmpipe.trainer.setup.strategy import LossNotes, build_strategy

MARK = "weighed: "


class CountingFile:
    """A safetensors file that counts the bytes that are read of each of its tensors. What it gives is weighed as memory
    of its own; a view of a mapped file would weigh as much as the file."""

    reads: ClassVar[Counter[str]] = Counter()

    def __init__(self, path: Any, framework: str) -> None:
        self._file = safe_open(path, framework=framework)

    def __enter__(self) -> CountingFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> Tensor:
        return self._counted(name, lambda: self._file.get_tensor(name))

    def get_slice(self, name: str) -> CountingSlice:
        return CountingSlice(self._file.get_slice(name), lambda read: self._counted(name, read))

    def _counted(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        with _disable_current_modes():
            tensor = read()
        self.reads[name] += tensor.nbytes
        return tensor.clone()


@dataclass(frozen=True)
class CountingSlice:
    stored: Any
    counted: Callable[[Callable[[], Tensor]], Tensor]

    def get_shape(self) -> list[int]:
        return list(self.stored.get_shape())

    def __getitem__(self, rows: slice) -> Tensor:
        return self.counted(lambda: self.stored[rows])


def from_disk() -> int:
    """Bytes that this process had the kernel read from a disk, and not from its page cache."""
    with open("/proc/self/io", encoding="utf-8") as file:
        return int(dict(line.split(": ") for line in file)["read_bytes"])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", nargs="+", required=True)
    worker = start_worker()
    weight_files.safe_open = CountingFile
    found = {}
    for config in parser.parse_args().configs:
        job = JobConfig.load(config)
        family, data = family_of(job.model), open_data(job)
        CountingFile.reads.clear()
        before = from_disk()
        with Scales() as scales:
            run = OpenRun(job, job, family, data, replica_of(job.train, worker), worker)
            built = build_model(run)
            ready = build_strategy(run, built, LossNotes())
            gc.collect()
            one = {"peak": scales.peak_bytes, "held": scales.held_bytes(), "reads": dict(CountingFile.reads)}
        one["from_disk"] = from_disk() - before
        found[job.run.run_id] = [one] * worker.world_size
        dist.all_gather_object(found[job.run.run_id], one)
        del built, ready
        gc.collect()
    if worker.is_first:
        print(MARK + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    run_worker(main)
