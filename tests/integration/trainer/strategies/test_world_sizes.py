"""Every strategy on 2, 4 and 8 processes takes the 20 steps of one process: the same losses, and the same weights.

A step's rows are one micro-batch of each rank, or four; the last step of an epoch has ranks without a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import encode_features, losses, make_run, summary, train_runs
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.strategies.registry import strategy_names

STEPS, ROWS = 20 if WHOLE else 6, 32
TWO_NODES = {"hsdp", "tp+pp+dp"}  # where ranks of a node are told from those of another
RANKS_OF_A_COPY = {"tp": 2, "pp": 2, "tp+pp+dp": 4}
DATA = {"data.max_samples": 600, "train.epochs": 100, "train.max_steps": STEPS, "train.global_batch_size": ROWS}
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    " adapters": {"model.lora": {"rank": 4}},
    " unpacked": {"data.pack": False},
    " trained tower": {"model.freeze": [], "features.cache": "off"},
}
CASES = {
    f"{strategy} on {processes}, {passes} passes{kind}": (strategy, processes, passes, kind)
    for strategy in strategy_names()
    for processes in (2, 4, 8)
    for passes in (1, 4)
    for kind in KINDS
    if processes >= RANKS_OF_A_COPY.get(strategy, 1)
    if not kind or (processes, passes) == (4, 4)
}
# Stages, and ranks that split layers, are on four processes in test_pipeline_parallel.py and test_tensor_parallel.py.
TRIED = chosen(CASES, lambda name: name == "zero2 on 4, 1 passes")


def kind_of(name: str) -> str:
    return CASES[name][-1]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world-sizes")
    encode_features(make_run(root, "features", DATA))
    return root


def run_of(root: Path, name: str, kind: str, changes: dict[str, Any]) -> JobConfig:
    features = "off" if kind == " trained tower" else "reuse"
    return make_run(root, name.replace(" ", "-").replace(",", ""), DATA | KINDS[kind] | changes, features=features)


@pytest.fixture(scope="module")
def references(root: Path) -> dict[str, JobConfig]:
    """Of one process, by kind."""
    kinds = {kind_of(name) for name in TRIED}
    jobs = {
        kind: run_of(root, f"one process{kind}", kind, {"train.micro_batch_size": 8, **EVERY_STEP})
        for kind in sorted(kinds)
    }
    train_runs(list(jobs.values()), processes=1)
    return jobs


@pytest.fixture(scope="module")
def trained(root: Path) -> Callable[[str], JobConfig]:
    """Trains all runs that can share a process group, when the first test asks for one of them."""
    jobs: dict[str, JobConfig] = {}

    def place(name: str) -> tuple[int, int, int, bool]:
        strategy, processes, passes, _ = CASES[name]
        return processes, 1 + (strategy in TWO_NODES), passes, strategy.startswith("zero")

    def job(name: str) -> JobConfig:
        if name not in jobs:
            beside = [other for other in TRIED if place(other) == place(name)]
            for other in beside:
                strategy, processes, passes, kind = CASES[other]
                copies = processes // RANKS_OF_A_COPY.get(strategy, 1)
                rows = {"train.micro_batch_size": ROWS // copies // passes}
                jobs[other] = run_of(root, other, kind, strategy_changes(strategy) | rows)
            processes, nodes, *_ = place(name)
            train_runs([jobs[other] for other in beside], processes=processes // nodes, nodes=nodes, timeout_s=600)
        return jobs[name]

    return job


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_a_run_equals_that_of_one_process(
    name: str, references: dict[str, JobConfig], trained: Callable[[str], JobConfig]
) -> None:
    job, reference = trained(name), references[kind_of(name)]
    assert summary(job)["world_size"] == CASES[name][1]
    assert len(losses(reference)) == STEPS
    require_equal_training(job, reference)
