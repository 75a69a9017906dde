"""The loop ends early at the same step, with the same best checkpoint, wherever it is killed, and trains no step again.

Model, files and ranks are stand-ins; the integration test has them (`evaluation/test_early_stopping.py`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.trainer.checkpoints import record
from vlmpipe.trainer import loop
from vlmpipe.trainer.checkpoint.attempts import step_of
from vlmpipe.trainer.checkpoint.commit import checkpoint_name
from vlmpipe.trainer.config.train_options import EarlyStoppingConfig
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.evaluation.best_step import BestStep
from vlmpipe.trainer.records.commit import parse_commit
from vlmpipe.trainer.records.validations import Validations

EVERY, SAVED_EVERY, TOTAL = 2, 8, 40
LOSSES = [9, 8, 7, 8, 6, 5, 4, 5, float("nan")]  # after steps 2, 4, ...


class KilledError(Exception):
    """Ends the process wherever it is."""


class Run:
    """What is left of a run between its starts."""

    def __init__(self) -> None:
        self.steps: list[int] = []  # made, by all starts
        self.lines: dict[int, dict[str, float]] = {}
        self.commits: dict[str, Any] = {}
        self.summary: dict[str, object] = {}
        self.points = itertools.count(1)
        self.killed_at = 0

    def point(self) -> None:
        if next(self.points) == self.killed_at:
            raise KilledError

    def train(self, monkeypatch: pytest.MonkeyPatch, *, least: float, killed_at: int = 0) -> ExitCode:
        self.points, self.killed_at = itertools.count(1), killed_at
        stands_in: dict[str, Any] = {
            "build_training": lambda *_: self.setup(), "require_room": lambda *_: None, "open_storage": lambda _: None,
            "Checkpoints": lambda *_: Checkpoints(self), "TrainingMonitor": lambda *_, **facts: Monitor(self, **facts),
            "StepProfiler": lambda *_, **__: SimpleNamespace(end_step=lambda *_: None), "agree": lambda value: value,
            "MetricsQueue": lambda _: SimpleNamespace(add=lambda pending, **_: [pending], rest=list),
            "Watchdog": lambda *_: SimpleNamespace(pause=contextlib.nullcontext, beat=id, close=lambda: None),
            "PrefetchingLoader": lambda *_, first_step, end_step, **__: Stream(self, first_step, end_step),
            "AsyncStepMetrics": lambda loss, result, data, **_: data.step + 1, "rate_factor": lambda *_: 1.0,
            # They would go through all that the tests' process has imported, in each of hundreds of starts.
            "collect_between_steps": lambda: None, "collect_as_usual": lambda: None,
        }  # fmt: skip
        for name, stand_in in stands_in.items():
            monkeypatch.setattr(loop, name, stand_in)
        job: Any = SimpleNamespace(
            train=SimpleNamespace(
                best_metric="validation_loss", early_stopping=EarlyStoppingConfig(patience=2, min_improvement=least),
                validate_every_steps=EVERY, checkpoint_every_steps=SAVED_EVERY, micro_batch_size=1,
            ),
            checkpoint=SimpleNamespace(export="best"), run=SimpleNamespace(run_uri=""),
        )  # fmt: skip
        worker, stop = SimpleNamespace(device="cpu"), SimpleNamespace(requested=False)
        return loop.train(job, worker, stop)  # type: ignore[arg-type]

    def setup(self) -> Any:
        batch = SimpleNamespace(sequences_consumed=0)
        loader = SimpleNamespace(sampler=SimpleNamespace(batch=lambda _: batch), close=lambda: None)
        strategy = SimpleNamespace(forward_backward=lambda *_: 1.0, step=lambda _: None)
        return SimpleNamespace(
            strategy=strategy, loader=loader, record=None, source_losses=None, image_source=None, replica=None,
            facts=SimpleNamespace(total_steps=TOTAL, num_trainable=1),
            validation=SimpleNamespace(label_tokens=10, losses=lambda *_: self.validation()),
        )  # fmt: skip

    def validation(self) -> dict[str, float]:
        self.point()
        return {"validation_loss": LOSSES[max(self.lines) // EVERY - 1], "validation_label_tokens": 10}


class Stream:
    def __init__(self, run: Run, first: int, end: int) -> None:
        self._run, self._steps, self.waited_s = run, range(first, end), 0.0

    def __iter__(self) -> Iterator[Any]:
        for step in self._steps:
            self._run.point()
            self._run.steps.append(step + 1)
            yield SimpleNamespace(step=step, epoch=0, batches=[], global_loss_terms=1)

    def close(self) -> None:
        pass


class Checkpoints:
    """Saves in the background: that a checkpoint is committed is known at the next save, or at the end."""

    start, wants_again = None, False

    def __init__(self, run: Run) -> None:
        self._run, self.committed = run, next(reversed(run.commits), "")
        self._attempt = len(run.commits) + 1

    def resume(self) -> Any:
        if not self.committed:
            return None
        checkpoint = SimpleNamespace(name=self.committed, record=self._run.commits[self.committed])
        return SimpleNamespace(checkpoint=checkpoint)

    def save(self, step: int, _: int, __: int, ___: float, ____: object, validations: Validations) -> None:
        self._run.point()
        self.settle()
        if self.committed:
            validations = validations.committed(self.committed, step_of(self.committed))
        name = checkpoint_name(self._attempt, step, "abcdef")
        self._run.commits[name] = parse_commit(record(step=step, validations=validations).text(), name)
        self._run.point()

    def is_committed(self, name: str) -> bool:
        return name in self._run.commits

    def settle(self, *_: object) -> bool:
        self.committed = next(reversed(self._run.commits), "")
        return True

    def finish(self, _: str) -> str:
        return self.committed

    def notes(self, _: object) -> list[str]:
        return []

    def take_warnings(self) -> list[str]:
        return []

    def mirror_lag(self, _: int) -> None:
        pass

    finished_before_errors = contextlib.nullcontext


class Monitor:
    last_loss, stop_requested, save_requested = 1.0, False, False

    def __init__(self, run: Run, *, first_step: int, **_: object) -> None:
        self._run, self.last_step = run, first_step
        run.lines = {step: line for step, line in run.lines.items() if step <= first_step}

    def count(self, steps: list[int]) -> None:
        for step in steps:
            self.last_step = step
            self._run.lines.setdefault(step, {})

    def validation(self) -> dict[str, float] | None:
        return self._run.lines.get(self.last_step)

    def validated(self, losses: dict[str, float], _: float) -> None:
        self._run.lines[self.last_step].update(losses)
        self._run.point()

    def close(self, *, checkpoint: str, stopped: bool, best: dict[str, object]) -> None:
        self._run.summary = {"steps": self.last_step, "checkpoint": step_of(checkpoint), **best}

    def nothing(self, *_: object, **__: object) -> bool:
        return False

    is_due = step = flush = saved = note = nothing  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("least", "last", "best"), [(0.0, 18, 14), (1.0, 10, 10)], ids=["by anything", "by more than 1"]
)
def test_a_run_ends_early_wherever_it_is_killed(
    least: float, last: int, best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = Run()
    assert straight.train(monkeypatch, least=least) == ExitCode.OK
    points = next(straight.points)
    said = straight.summary
    assert (said["steps"], said["checkpoint"], said["best_step"]) == (last, last, best) and said["ended_early"]
    assert step_of(str(said["best_checkpoint"])) == best and straight.steps == list(range(1, last + 1))
    for killed_at in range(1, points):
        run = Run()
        with pytest.raises(KilledError):
            run.train(monkeypatch, least=least, killed_at=killed_at)
        for _ in range(2):  # the second time all is done
            made = len(run.steps)
            run.train(monkeypatch, least=least)
            found = run.summary | {"best_checkpoint": step_of(str(run.summary["best_checkpoint"]))}
            assert found == said | {"best_checkpoint": best}, killed_at
            assert [step for step in run.lines if run.lines[step]] == list(range(EVERY, last + 1, EVERY)), killed_at
        assert len(run.steps) == made, "no step is made after the end"


def test_a_checkpoint_without_validations_is_said_where_they_decide() -> None:
    """Of an earlier version, or saved while the run did not validate."""
    validation: Any = SimpleNamespace(label_tokens=10)
    resumed: Any = SimpleNamespace(checkpoint=SimpleNamespace(name="old", record=record(step=8)))
    for export, said in (
        ("last", []),
        ("best", ["old records no validations: the best step is looked for from step 8 on"]),
    ):
        job: Any = SimpleNamespace(
            train=SimpleNamespace(best_metric="validation_loss", early_stopping=None, validate_every_steps=2),
            checkpoint=SimpleNamespace(export=export),
        )
        assert BestStep(job, validation, resumed, lambda _: True).notes == said
        assert BestStep(job, validation, None, lambda _: True).notes == []


KEPT, OTHER, NEWEST = (checkpoint_name(1, step, "abcdef") for step in (6, 4, 8))


@pytest.mark.parametrize(
    ("saved", "there", "best"),
    [(KEPT, {KEPT, NEWEST}, 6), (KEPT, {NEWEST}, 8), (OTHER, {OTHER, NEWEST}, 4), (OTHER, {NEWEST}, 8)],
    ids=["kept", "deleted by retention", "never saved", "never saved, and the other one deleted"],
)
def test_a_best_step_without_a_checkpoint_is_said_and_counts_no_more(saved: str, there: set[str], best: int) -> None:
    """As after a start with checkpoint.export last. The newest checkpoint was saved after its validation."""
    values = {4: 0.6, 6: 0.5, 8: 0.7}
    before = Validations("validation_loss", 10)
    for step, value in values.items():
        before = before.counted(step, value)
        if step == step_of(saved):
            before = before.committed(saved, step)
    validation: Any = SimpleNamespace(label_tokens=10)
    job: Any = SimpleNamespace(
        train=SimpleNamespace(
            best_metric="validation_loss", early_stopping=EarlyStoppingConfig(patience=3), validate_every_steps=2
        ),
        checkpoint=SimpleNamespace(export="best"),
    )
    resumed: Any = SimpleNamespace(checkpoint=SimpleNamespace(name=NEWEST, record=record(step=8, validations=before)))
    found = BestStep(job, validation, resumed, there.__contains__)
    assert found.state and (found.state.best, found.state.best_step) == (values[best], best)
    assert step_of(found.state.saved) == best and found.state.waited == before.waited, "patience goes by all values"
    assert [note[:6] for note in found.notes] == ([] if best == 6 else ["step 6"])
    found.count(10, {"validation_loss": 0.55})
    assert found.is_worth_saving(10) == (best != 6)
    job.checkpoint.export = "last"
    assert not BestStep(job, validation, resumed, lambda _: False).notes


def test_an_end_without_a_best_step_left_is_in_the_summary() -> None:
    before = Validations("validation_loss", 10).counted(2, 0.5).committed(checkpoint_name(1, 2, "abcdef"), 2)
    before = before.counted(4, 0.6).counted(6, 0.7)
    validation: Any = SimpleNamespace(label_tokens=10)
    job: Any = SimpleNamespace(
        train=SimpleNamespace(
            best_metric="validation_loss", early_stopping=EarlyStoppingConfig(patience=2), validate_every_steps=2
        ),
        checkpoint=SimpleNamespace(export="best"),
    )
    resumed: Any = SimpleNamespace(checkpoint=SimpleNamespace(name=NEWEST, record=record(step=8, validations=before)))
    summary = BestStep(job, validation, resumed, lambda _: False).summary()
    assert summary["ended_early"] and summary["best_step"] is None and not summary["best_checkpoint"]
