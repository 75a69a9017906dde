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
    work: float = 0.0  # share of the step's work that is done, where its units differ in theirs; else 0
    first: tuple[float, float] = (0.0, 0.0)  # elapsed_s and `made` when units were seen for the first time
    last: tuple[float, float] | None = None  # and when they last changed

    @property
    def title(self) -> str:
        """The step's name in the pipeline, which begins with the stage's."""
        return f"{self.stage}-{self.name}" if self.stage else self.name

    @property
    def share(self) -> float:
        """Share of the step that is done, 0 to 1; 0 if not known. All of one that is done, as after an early end."""
        if self.state in ("done", "reused"):
            return 1.0
        made, of = self.made
        return min(1.0, max(0.0, made / of)) if of > 0 else 0.0

    @property
    def made(self) -> tuple[float, float]:
        """The done part and the whole, in the step's units or as shares of its work."""
        return (self.work, 1.0) if self.work else (self.done, self.total)

    @property
    def exit_code(self) -> int:
        """The exit code in the record of a step that failed."""
        return int(self.detail.get("exit_code", ExitCode.UNEXPECTED))

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the speed so far; None if not known, or once the next unit takes longer than all
        that are left were expected to.

        The first units also take the step's start, such as loading a model: speed is that of the units after `first`.
        It is that of whole units, up to `last`: between two, the time left goes down.
        """
        (first_s, first_made), (made, of) = self.first, self.made
        last_s, last_made = self.last or (self.elapsed_s, made)
        took_s, since = last_s - first_s, last_made - first_made
        share = since / of if of > 0 else 0.0
        is_worth_it = share >= MIN_SHARE or (took_s >= MIN_ELAPSED_S and share >= MIN_LONG_SHARE)
        if self.state != "running" or not is_worth_it:
            return None
        left_s = took_s * max(0.0, of - made) / since
        waited_s = self.elapsed_s - last_s
        return max(0.0, left_s - waited_s) if waited_s < left_s or not left_s else None


class SteadyClocks:
    """Keeps the clock of a step from going back: the job of a step writes a record of its own, with a later start.

    Remembers when a step's first and last units were seen, between which its speed counts.
    """

    def __init__(self) -> None:
        self._started_s: dict[str, float] = {}
        self._first: dict[str, tuple[float, float]] = {}
        self._last: dict[str, tuple[float, float]] = {}

    def __call__(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(map(self._steady, steps))

    def _steady(self, step: Step) -> Step:
        if not step.started_s:
            return step
        first_s = min(self._started_s.setdefault(step.title, step.started_s), step.started_s)
        self._started_s[step.title] = first_s
        now = elapsed_s, made = step.elapsed_s + step.started_s - first_s, step.made[0]
        steady = replace(step, started_s=first_s, elapsed_s=elapsed_s)
        if not made:
            return steady
        first, last = self._first.get(step.title, now), self._last.get(step.title, now)
        if made < last[1]:  # another job of the step, which counts from its beginning
            first = now
        if made != last[1]:
            last = now
        self._first[step.title], self._last[step.title] = first, last
        return replace(steady, first=first, last=last)


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
