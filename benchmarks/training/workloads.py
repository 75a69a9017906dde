"""What the training step is measured on: shipped run files, one of them with a tower that is worth caching."""

from __future__ import annotations

from benchmarks.support.suite import Bench
from benchmarks.support.workloads import Workload, workload

TOLERANCE = 1e-4  # relative, of losses in fp32; sums in another order, or in fused kernels, differ by less
QUICK = {"digits": ("digits", ("train.global_batch_size=4", "train.micro_batch_size=2", "data.max_samples=600"))}
WIDE_TOWER = ("hidden_size=256", "intermediate_size=1024", "num_hidden_layers=6")  # a fifth of an online step
FULL = {
    "digits": ("digits", ()),
    "easy-vqa, wide tower": (
        "easy-vqa",
        (
            "data.max_samples=800",
            "train.global_batch_size=8",
            *[f"model.tower.config.{setting}" for setting in WIDE_TOWER],
        ),
    ),
}


def train_workloads(bench: Bench) -> list[Workload]:
    sets = QUICK if bench.quick else FULL
    return [workload(bench, run_file, overrides, name=name) for name, (run_file, overrides) in sets.items()]
