"""Collectives are timed over real ranks, of every kind of group that a job has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.trainer.runs import make_run, metrics, run_ranks, summary
from vlmpipe.trainer.distributed.collectives import CPU_SIZES_BYTES, FILE, PASSES

KINDS = {"all ranks": 4, "ranks of a node": 2, "one rank of each node": 2}


def test_two_nodes_of_two_ranks_are_measured_before_they_train(tmp_path: Path) -> None:
    job = make_run(tmp_path, "measured", {"train.measure_communication": True, "train.max_steps": 1}, features="off")
    said = run_ranks("vlmpipe.trainer.train", ["--config", f"{job.run.run_uri}/run.json"], processes=2, nodes=2)
    speeds = json.loads(Path(job.run.run_uri, FILE).read_text(encoding="utf-8"))
    assert {(each["among"], each["ranks"], each["collective"], each["bytes"]) for each in speeds} == {
        (among, ranks, collective, size)
        for among, ranks in KINDS.items()
        for collective in PASSES
        for size in CPU_SIZES_BYTES
    }
    for each in speeds:
        assert each["seconds"] > 0
        carried = PASSES[each["collective"]] * each["bytes"] * (each["ranks"] - 1) / each["ranks"]
        assert each["bus_gb_per_s"] == pytest.approx(carried / each["seconds"] / 1e9)
    assert said.count("communication: ") == 1 + len(speeds)
    found = summary(job)
    assert found["steps"] == 1, "and then it trains"
    (line,) = metrics(job)
    assert len(found["peak_memory_gib"]) == 4 and max(found["peak_memory_gib"]) == line["peak_memory_gib"] > 0.1
    assert 1 <= line["straggler_spread"] < 4 and line["slowest_rank"] in range(4)
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert {name for name in found | line if f"`{name}`" not in page} == set(), "each is documented"
    assert 0 < found["goodput"] <= 1 and line["samples_per_s"] > 0


def test_ranks_wait_for_a_transfer_of_another_longer_than_for_its_step() -> None:
    said = run_ranks("tests.support.drivers.wait_for_a_slow_rank", [], processes=2)
    assert "a step's collective:" in said, "which waits as long as the process group was told"
