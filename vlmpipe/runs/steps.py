"""The steps of a run, which are the same on every target: their names, in order, and what is known of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.records.step import StepRecord

STEPS = (
    "resolve-run",
    "replay",
    "prepare-data",
    "cache-features",
    "train",
    "sync-checkpoint",
    "evaluate",
    "benchmark",
    "audit",
    "decide",
    "register-model",
    "deploy-model",
    "notify",
)
OF_A_SWEEP = ("resolve-run", "prepare-data", "cache-features", "train-variants", "compare-variants")  # its last stage
DECIDING = ("decide", "compare-variants")  # the last step of a stage
OPTIONAL = ("replay", "benchmark", "audit", "deploy-model")  # a run without the section has no such step
OF_THE_RUN = ("register-model", "deploy-model", "notify")  # once, after all stages
# Steps that do most of the work of another one, or prepare it: with several data.tasks, and with a source of replay.
EARLIER = {"prepare-data": ("plan-data", "prepare-chunks"), "replay": ("choose-replay",)}


# From which an ETA is shown: of a step that has run for long, a smaller share says enough.
MIN_SHARE, MIN_LONG_SHARE, MIN_ELAPSED_S = 0.02, 0.002, 60.0


@dataclass(frozen=True)
class Step:
    """One step. `state` is waiting, running, done, reused, failed, stopped or skipped."""

    name: str
    state: str = "waiting"
    elapsed_s: float = 0.0
    done: float = 0
    total: float = 0
    unit: str = ""
    message: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    started_s: float = 0.0  # Unix seconds; 0 while it waits
    stage: str = ""  # empty in a run without stages, and of the steps after all of them
    first: tuple[float, float] = (0.0, 0.0)  # elapsed_s and done when units were seen for the first time

    @property
    def title(self) -> str:
        """The step's name in the pipeline, which begins with the stage's."""
        return f"{self.stage}-{self.name}" if self.stage else self.name

    @property
    def share(self) -> float:
        """Share of the step that is done, 0 to 1; 0 if not known. All of one that is done, as after an early end."""
        if self.state in ("done", "reused"):
            return 1.0
        return min(1.0, max(0.0, self.done / self.total)) if self.total > 0 else 0.0

    @property
    def exit_code(self) -> int:
        """The exit code in the record of a step that failed."""
        return int(self.detail.get("exit_code", ExitCode.UNEXPECTED))

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the speed so far; None if not known.

        The first units also take the step's start, such as loading a model: speed is that of the units after `first`.
        """
        first_s, first_done = self.first
        took_s, made = self.elapsed_s - first_s, self.done - first_done
        share = made / self.total if self.total > 0 else 0.0
        is_worth_it = share >= MIN_SHARE or (took_s >= MIN_ELAPSED_S and share >= MIN_LONG_SHARE)
        if self.state != "running" or not is_worth_it:
            return None
        return took_s * max(0.0, self.total - self.done) / made


class SteadyClocks:
    """Keeps the clock of a step from going back: the job of a step writes a record of its own, with a later start.

    Remembers when a step's first units were seen, from which its speed counts.
    """

    def __init__(self) -> None:
        self._started_s: dict[str, float] = {}
        self._first: dict[str, tuple[float, float]] = {}

    def __call__(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(map(self._steady, steps))

    def _steady(self, step: Step) -> Step:
        if not step.started_s:
            return step
        first_s = min(self._started_s.setdefault(step.title, step.started_s), step.started_s)
        self._started_s[step.title] = first_s
        elapsed_s = step.elapsed_s + step.started_s - first_s
        first = self._first.get(step.title, (elapsed_s, step.done))
        if step.done < first[1]:  # another job of the step, which counts from its beginning
            first = (elapsed_s, step.done)
        if step.done:
            self._first[step.title] = first
        return replace(step, started_s=first_s, elapsed_s=elapsed_s, first=first if step.done else (0.0, 0.0))


def steps_of(stages: Sequence[str], *, sweeps: bool = False) -> Iterator[tuple[str, str]]:
    """Stage and name of each step, in order. `sweeps`: the last stage is a sweep."""
    *earlier, last = stages
    of_a_stage = [name for name in STEPS if name not in OF_THE_RUN]
    for stage in earlier:
        yield from ((stage, name) for name in of_a_stage)
    yield from ((last, name) for name in (OF_A_SWEEP if sweeps else of_a_stage))
    yield from (("", name) for name in (("notify",) if sweeps else OF_THE_RUN))


def without_absent(steps: Iterable[Step]) -> list[Step]:
    """The steps, without optional ones that have not begun: most runs have none."""
    return [step for step in steps if step.name not in OPTIONAL or step.state not in ("waiting", "skipped")]


def with_reused_stages(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Mark as reused the steps that are skipped because an earlier attempt of the run finished their stage.

    Of such a stage only the first step and the gate run. The last stage's steps all run.
    """
    decided = [step.stage for step in steps if step.name in DECIDING and step.state not in ("waiting", "skipped")]
    last = [step.stage for step in steps if step.name in DECIDING][-1:]
    return tuple(
        replace(step, state="reused", message="accepted in an earlier attempt")
        if step.state in ("waiting", "skipped") and step.stage in decided and step.stage not in last and step.stage
        else step
        for step in steps
    )


def step_of_record(record: StepRecord, elapsed_s: float) -> Step:
    """The step that wrote this record, with the time that it has taken."""
    return Step(
        name=record.step,
        state=record.state,
        elapsed_s=elapsed_s,
        done=record.done,
        total=record.total,
        unit=record.unit,
        message=record.message,
        detail=dict(record.detail),
        started_s=record.started_s,
    )
