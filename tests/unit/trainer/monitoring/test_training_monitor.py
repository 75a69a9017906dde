"""What the monitor makes of the ranks' gauges and times: metrics of a line, and warnings that name rank and node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.checkpoint.attempts import Attempts
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.monitoring import training_monitor
from vlmpipe.trainer.monitoring.gpu_telemetry import NOTHING, GpuReading
from vlmpipe.trainer.monitoring.rank_metrics import RankMetrics
from vlmpipe.trainer.monitoring.step_metrics import StepTotals
from vlmpipe.trainer.monitoring.training_monitor import TrainingMonitor
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import write_record

WORKER = ProcessContext(0, 4, 0, 2, torch.device("cpu"))  # the first of two nodes with two ranks each
COOL = GpuReading(90.0, 10.0, 400.0, 60.0, 0.0, 0.0)
HOT = replace(COOL, temperature_c=92.0, throttle_reasons=float(0x40))  # by heat


class Strategy:
    loss_scale = SimpleNamespace(scale=None)

    def learning_rate(self) -> float:
        return 1e-3


def monitored(
    folder: Path,
    ranks: Sequence[RankMetrics],
    monkeypatch: pytest.MonkeyPatch,
    sources: Sequence[Sequence[dict[str, tuple[float, float]]]] = (),
) -> tuple[list[dict[str, Any]], list[str]]:
    """Lines and notes of a run whose ranks tell these, a line a step. sources: losses by source of the steps that each
    line counts."""
    store = open_storage(str(folder / "runs/r1"))
    content = merged(TINY, {"run": {"run_id": "r1", "root_uri": str(folder)}})

    store.write("run.json", json.dumps(content).encode())
    job = JobConfig.load(store.uri("run.json"))
    told = iter(ranks)
    monkeypatch.setattr(training_monitor, "gather_rank_metrics", lambda *_: next(told))
    monkeypatch.setattr(training_monitor, "_scale_metrics", lambda _: {})
    facts: Any = SimpleNamespace(
        total_steps=len(ranks), forward_timer=None, features="cached", compiling=SimpleNamespace(on=False),
        shape=family_of(job.model).shape(job.model),
    )  # fmt: skip
    monitor = TrainingMonitor(job, WORKER, facts, first_step=0, start=Attempts(attempt=1))
    for step in range(1, len(ranks) + 1):
        for of_step in sources[step - 1] if sources else [{}]:
            totals = StepTotals(step, 1, 2.0, 1.0, 100, 128, 20, 4, 4, stop=False, save=False, sources=of_step)
            monitor.count([totals])
        monitor.step(step, Strategy(), 0.0, None, validates=False)  # type: ignore[arg-type]
    monitor.flush()
    lines = [json.loads(line) for line in store.read("metrics.jsonl").decode().splitlines()]
    return lines, list(monitor._progress.record.detail.get("notes", []))


def told(gpus: Sequence[GpuReading], forward_s: Sequence[float] = (0.0,) * 4) -> RankMetrics:
    return RankMetrics([1.0] * 4, [0.0] * 4, list(forward_s), [0.0] * 4, list(gpus), [0.0] * 4, [0.0] * 4)


def test_a_gpu_that_is_throttled_again_and_again_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cool, hot = [COOL] * 4, [COOL, COOL, COOL, HOT]
    lines, notes = monitored(tmp_path, [told(gpus) for gpus in (cool, hot, cool, hot, cool, hot)], monkeypatch)
    assert [line["gpus_throttled"] for line in lines] == [0, 1, 0, 1, 0, 1]
    assert lines[1]["gpu_temperature_c"] == 92 and lines[1]["gpu_utilization"] == 90
    (note,) = notes
    assert "the GPU of rank 3 (node 1) is throttled" in note


def test_a_straggler_is_named_with_its_node_and_cpus_have_no_gauges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [[step * 1.0, step * 1.0, step * 1.6, step * 1.0] for step in range(1, 9)]
    lines, notes = monitored(tmp_path, [told([NOTHING] * 4, each) for each in times], monkeypatch)
    (note,) = notes
    assert "rank 2 (node 1) is a straggler" in note
    assert not any(name.startswith("gpu") for line in lines for name in line)


def test_waits_for_data_after_the_first_step_are_said_while_training_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = [[1000.0 * step] * 4 for step in range(1, 6)]  # far more than a line takes here
    ranks = [replace(told([NOTHING] * 4), data_wait_s=each) for each in waits]
    lines, notes = monitored(tmp_path, ranks, monkeypatch)
    (note,) = notes
    assert "of the time training waits for data" in note and "data.shard_cache_gib" in note
    assert all(line["loader_threads"] >= 1 for line in lines)


def test_a_sources_loss_is_the_mean_of_all_its_label_tokens_since_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [
        [{"cats": (6.0, 2.0), "dogs": (0.0, 0.0)}, {"cats": (4.0, 3.0), "dogs": (9.0, 3.0)}],
        [{"cats": (0.0, 0.0), "dogs": (8.0, 2.0)}],
    ]
    lines, _ = monitored(tmp_path, [told([COOL] * 4)] * 2, monkeypatch, steps)
    found = [{name: value for name, value in line.items() if name.startswith("loss/")} for line in lines]
    assert found == [{"loss/cats": 2.0, "loss/dogs": 3.0}, {"loss/dogs": 4.0}]


def test_a_summary_that_cannot_be_read_is_replaced_at_the_end(tmp_path: Path) -> None:
    """Of another version, of a run that a resume finds complete: all training is paid for by then."""
    store = open_storage(str(tmp_path))
    write_record(store, Summary.FILE, {"steps": "all of them"})
    monitor: Any = SimpleNamespace(
        _log=SimpleNamespace(store=lambda: None), _job=SimpleNamespace(run=SimpleNamespace(run_uri=str(tmp_path))),
        _first_step=3, _last_step=3, _summary=lambda checkpoint, _: Summary(steps=3, tokens=9, checkpoint=checkpoint),
    )  # fmt: skip
    TrainingMonitor._store_results(monitor, "step-3", {})
    assert Summary.read(store).checkpoint == "step-3"
    # The start that wrote it was stopped before its last validation, which now ends training early.
    monitor._summary = lambda *_: pytest.fail("this start has counted no tokens")
    TrainingMonitor._store_results(monitor, "step-3", {"best_step": 1, "ended_early": "no better in 2"})
    written = Summary.read(store)
    assert (written.tokens, written.best_step, written.ended_early) == (9, 1, "no better in 2")


@pytest.mark.parametrize(("last_step", "is_early"), [(10, True), (12, False)])
def test_patience_that_ends_with_the_last_planned_step_ends_nothing_early(last_step: int, is_early: bool) -> None:
    said, told_early, stored = list[str](), list[int](), list[Any]()
    monitor: Any = SimpleNamespace(
        _telemetry=None, _worker=SimpleNamespace(is_first=True), _facts=SimpleNamespace(total_steps=12),
        _job=SimpleNamespace(checkpoint=SimpleNamespace(max_s_without_commit=1.0)),
        _first_step=0, _last_step=last_step, _last_loss=0.5, _store_results=lambda _, best: stored.append(best),
        _progress=SimpleNamespace(update=lambda *_: None, finish=lambda message: said.append(message)),
        _log=SimpleNamespace(end_early=told_early.append, close=lambda: None),
    )  # fmt: skip
    TrainingMonitor.close(monitor, checkpoint="c", stopped=False, best={"best_step": 8, "ended_early": "no better"})
    ended = "loss 0.5000 after 10 steps of at most 12: ended early, no better"
    assert said == [ended if is_early else "loss 0.5000 after 12 steps"]
    assert (told_early, stored[0]) == ([10] * is_early, {"best_step": 8, "ended_early": "no better" * is_early})
