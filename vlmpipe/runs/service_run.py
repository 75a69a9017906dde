"""A run on a service, Vertex AI or Kubeflow: the service has its state, the run's folder the records of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from vlmpipe.records.decision import Decision
from vlmpipe.records.learning_curve import LearningCurve
from vlmpipe.records.plan import PlannedRun
from vlmpipe.records.registered import Registered
from vlmpipe.records.sweep_comparison import SweepComparison
from vlmpipe.runs.capacity_attempts import FILE as FALLBACK
from vlmpipe.runs.capacity_attempts import Attempt, parse_attempts
from vlmpipe.runs.steps import DECIDING
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.record import Record
from vlmpipe.trainer.records.step import FOLDER, parse_step, step_of_file
from vlmpipe.trainer.records.sweep import JOB_STEP
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import in_bucket
from vlmpipe.trainer.storage.records import unseal

if TYPE_CHECKING:
    from vlmpipe.runs.run_state import RunState
    from vlmpipe.trainer.records.step import StepRecord

RECORDS: tuple[type[Record], ...] = (PlannedRun, Evaluation, Decision, Registered, SweepComparison, LearningCurve)
RESULTS = tuple(kind.FILE for kind in RECORDS)
R = TypeVar("R", bound=Record)
CLOCKS_APART_S = 60.0  # a record may be that much older than the job, by its machine's clock


@dataclass(frozen=True)
class RunFiles:
    """The files of a run's folder, or in `unreadable` why they could not be read."""

    records: Mapping[str, StepRecord] = field(default_factory=dict)
    contents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    options: tuple[Attempt, ...] = ()  # of cluster.capacity_fallback that were tried
    unreadable: str = ""

    def record(self, kind: type[R]) -> R | None:
        """Return a record of the run; None where there is none, or one that is not of this version (`refused`)."""
        with contextlib.suppress(ConfigError):
            return kind.of(self.contents[kind.FILE], kind.FILE) if self.contents.get(kind.FILE) else None
        return None

    @property
    def refused(self) -> Iterator[str]:
        """Yield why a record that is there counts as missing."""
        for kind in RECORDS:
            if self.contents.get(kind.FILE) == {}:
                yield f"{kind.FILE} is damaged"
            elif kind.FILE in self.contents:
                try:
                    kind.of(self.contents[kind.FILE], kind.FILE)
                except ConfigError as error:
                    yield error.found


class ServiceRun:
    """Consequences of the service's word for a run's state; its dataclasses say which words there are."""

    OUTCOMES: ClassVar[Mapping[str, str]]  # by the service's word
    OVER: ClassVar[tuple[str, ...]]  # words of runs that have ended
    service_state: str
    state: RunState
    files_of: Mapping[str, RunFiles]  # by stage

    @property
    def files(self) -> RunFiles:
        """The current stage's files; if an earlier stage's gate ended the run, that stage's."""
        is_ended = self.is_over and self.outcome == "done" and self.state.decided
        return self.files_of[self.state.decided[-1] if is_ended else self.state.stage]

    @property
    def refused(self) -> list[str]:
        """Why records that are there count as missing, of all stages."""
        of_all = [(f"stage {stage}: " if stage else "", files) for stage, files in self.files_of.items()]
        return [f"{where}{reason}" for where, files in of_all for reason in files.refused]

    @property
    def decision(self) -> Decision | None:
        return self.files.record(Decision)

    @property
    def outcome(self) -> str:
        """waiting, running, stopping, paused, done, stopped or failed."""
        return self.OUTCOMES.get(self.service_state, "running")

    @property
    def is_over(self) -> bool:
        return self.service_state in self.OVER

    @property
    def exit_code(self) -> int | None:
        """The exit code that `vlmpipe run` would have; None while the run is not over."""
        if not self.is_over:
            return None
        if self.outcome != "failed":
            return int(ExitCode.OK if self.outcome == "done" else ExitCode.PREEMPTED)
        return self.state.failed.exit_code if self.state.failed else int(ExitCode.UNEXPECTED)


def read_files(run_uri: str, *, since_s: float) -> RunFiles:
    """The steps' records that are not older than the job, and the results."""
    if not in_bucket(run_uri) and not Path(run_uri).is_dir():
        return RunFiles(unreadable=f"{run_uri} is on a volume that this machine has not")
    try:
        store = open_storage(run_uri)
        stored = [info.name for info in store.list(FOLDER)]
        contents = {name: json_object(store.read(name)) for name in stored}
        contents |= {name: json_object(store.read(name)) for name in (*RESULTS, FALLBACK) if store.stat(name)}
        run_file = store.stat("run.json")
    except UserError as error:
        return RunFiles(unreadable=error.found.splitlines()[0])
    names = {step_of_file(name): name for name in stored}
    records = {step: record for step, name in names.items() if (record := parse_step(step, contents[name]))}
    fresh = {step: record for step, record in records.items() if record.started_s >= since_s}
    results = {name: contents[name] for name in RESULTS if name in contents}
    if not fresh.keys() & {"notify", *DECIDING}:  # results of an earlier attempt of the same run
        results = {name: value for name, value in results.items() if name == PlannedRun.FILE}
    options = parse_attempts(contents.get(FALLBACK) or {}, run_file.version if run_file else "")
    return RunFiles(fresh, results, options)


def record_of(records: Mapping[str, StepRecord], name: str) -> StepRecord | None:
    """The record of a step; of a sweep's jobs their sum."""
    return _of_jobs(records) if name == JOB_STEP else records.get(name)


def _of_jobs(records: Mapping[str, StepRecord]) -> StepRecord | None:
    """The sum of the records of a sweep's jobs; None where none has begun."""
    jobs = [record for step, record in records.items() if step.startswith(f"{JOB_STEP}-")]
    if not jobs:
        return None
    done, total = sum(job.done for job in jobs), sum(job.total for job in jobs)
    return replace(jobs[-1], step=JOB_STEP, done=done, total=total, message="", detail={})


def json_object(data: bytes) -> dict[str, Any]:
    """A JSON object; empty for other data."""
    try:
        return unseal(data)
    except ValueError:
        return {}
