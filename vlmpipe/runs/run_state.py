"""State of a run on any target: its steps, its stages and how training goes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from vlmpipe.runs.steps import DECIDING, Step
from vlmpipe.trainer.errors import ExitCode

# Exit codes of a run that was stopped, and can be resumed.
STOPPED = (None, int(ExitCode.INTERRUPTED), int(ExitCode.PREEMPTED))


@dataclass(frozen=True)
class RunState:
    """State of a run. `metrics` is the last line of the current stage's metrics.jsonl, `train_eta_s` follows from the
    last few."""

    run_id: str
    steps: tuple[Step, ...]
    metrics: dict[str, Any] = field(default_factory=dict)
    train_eta_s: float | None = None

    def step(self, name: str) -> Step:
        """The current stage's step of that name."""
        return next(step for step in self.steps if step.name == name and step.stage in ("", self.stage))

    @property
    def stages(self) -> list[str]:
        """The stages in order; one with an empty name in a run without stages."""
        return [step.stage for step in self.steps if step.name in DECIDING]

    @property
    def decided(self) -> list[str]:
        """The stages whose gate has decided."""
        return [step.stage for step in self.steps if step.name in DECIDING and step.state in ("done", "reused")]

    @property
    def stage(self) -> str:
        """The current stage: the first one whose gate has not decided, else the last."""
        return next((stage for stage in self.stages if stage not in self.decided), (self.stages or [""])[-1])

    @property
    def failed(self) -> Step | None:
        """The first step that failed."""
        return next((step for step in self.steps if step.state == "failed"), None)

    @property
    def notes(self) -> list[str]:
        """Notes in the steps' records."""
        return [note for step in self.steps for note in step.detail.get("notes") or []]

    def ended(self, exit_code: int | None) -> RunState:
        """The state after the run: steps that did not start were skipped, those that did not end stopped or failed.

        `exit_code` is the run's, None when it was killed. In a run that was stopped no step counts as failed, whatever
        its record says of the signal; in one that failed, a step without an end failed and could not record it.
        """
        by_request = exit_code in STOPPED
        unfinished = "stopped" if by_request else "failed"

        def close(step: Step) -> Step:
            if step.state == "waiting":
                return replace(step, state="skipped")
            if step.state == "running":
                return replace(step, state=unfinished)
            return replace(step, state="stopped") if by_request and step.state == "failed" else step

        return replace(self, steps=tuple(map(close, self.steps)))


def clock(seconds: float) -> str:
    """Seconds for people: 3.2 s, 0:41, 1:02:03."""
    return f"{seconds:.1f} s" if seconds < 10 else remaining(seconds)


def remaining(seconds: float) -> str:
    """A remaining time, always as a clock: 0:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
