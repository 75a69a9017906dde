"""Interface of a platform: rules of a run file, the graph's steps, jobs, runs, publishing and schedules.

A platform is a folder here with one class, and a line of `vlmpipe.platforms.table`. What a platform does not do, it
refuses with a ConfigError, which this class writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol

from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.types import CustomJobSpec as CustomJobMessage

    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.run_settings import RunSettings
    from vlmpipe.config.sections.schedule import ScheduleConfig
    from vlmpipe.config.sections.tune import TuneConfig
    from vlmpipe.config.validation_errors import Problem
    from vlmpipe.job_spec.forms import CustomJobSpec
    from vlmpipe.job_spec.order import JobOrder
    from vlmpipe.planner.spending.approval import Approved
    from vlmpipe.platforms.compiled import Compiled, Template
    from vlmpipe.platforms.graph import Graph
    from vlmpipe.platforms.schedules import RunSchedule, Schedules
    from vlmpipe.records.decision import Decision
    from vlmpipe.records.registered import Registered
    from vlmpipe.runs.diagnosis import Diagnosis
    from vlmpipe.runs.run_state import RunState
    from vlmpipe.serving.agreement import Agreement
    from vlmpipe.serving.questions import ValidationQuestion


class Status(Protocol):
    """The status of a run, a job or a search, for a view, for people and as JSON."""

    @property
    def state(self) -> RunState: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def exit_code(self) -> int | None:
        """The exit code that `vlmpipe run` would have; None while the run is not over."""

    @property
    def decision(self) -> Decision | None:
        """The gate's, once it is made."""

    def lines(self) -> list[str]: ...
    def as_json(self) -> dict[str, object]: ...


@dataclass(frozen=True)
class LogLine:
    """One line that a run has printed; `shown` has a prefix where lines of several processes are mixed."""

    shown: str
    time: str  # empty if unknown
    step: str
    process: str
    text: str

    def as_json(self) -> dict[str, str | None]:
        return {"time": self.time or None, "step": self.step or None, "process": self.process, "text": self.text}


class Run(Protocol):
    """A run, or a job without a pipeline, that its platform has found by its name."""

    @property
    def argument(self) -> str:
        """The run's name in a command typed in this folder."""

    @property
    def asks(self) -> str:
        """The service that is asked about it, for messages; empty for records on this machine."""

    @property
    def asks_for_logs(self) -> str:
        """The service that has its logs, for messages; empty for files on this machine."""

    def reader(self) -> Callable[[], Status]:
        """A function that asks for the status."""

    def logs(self, *, step: str, last: int, follow: bool) -> Iterator[LogLine]:
        """Lines that the run has printed.

        Args:
            step: only this step's; empty for all.
            last: lines from the end; 0 for all.
            follow: continue until it is over.
        """

    def cancel(self) -> bool:
        """Ask the run to stop; False where it is stopping, or has stopped. Raises ConfigError for one that ended."""

    def diagnose(self) -> Diagnosis:
        """Reason why the run failed or stopped."""


class SearchRun(Protocol):
    """A search over settings, found by its name."""

    @property
    def name(self) -> str: ...

    @property
    def asks(self) -> str:
        """The service that is asked about it; empty for records on this machine."""

    def status(self) -> Status: ...
    def cancel(self) -> bool: ...


@dataclass(frozen=True)
class Order:
    """A run to submit: what to run, and what the user allows."""

    config: RunConfig
    template: Template | None  # a published pipeline to start, byte for byte; `config` is its run file
    compile: Callable[[RunConfig, Path], Compiled]  # for this platform
    source: Sequence[str]  # run file and overrides on the command line, recorded to show how to continue
    run_id: str  # an earlier run to continue; empty for a new one
    force: bool  # submit although the plan is red, and without checking buckets
    yes: bool  # do not ask, whatever it costs
    dry_run: bool  # do everything but ask and send
    ask: Callable[[str], bool] | None  # asks the user; None without a terminal


class Submitted(Protocol):
    """A request that was sent, or with --dry-run would be."""

    @property
    def started(self) -> Run | None:
        """The run that was started; None where nothing was sent."""

    def lines(self) -> list[str]: ...
    def as_json(self) -> dict[str, object]: ...


@dataclass(frozen=True)
class SentJob:
    """A job without a pipeline that was started. `name` is its name in commands."""

    resource_name: str
    name: str
    console_url: str
    run: Run


class JobRequest(Protocol):
    """A job without a pipeline, whole, before it is sent."""

    def as_dict(self) -> dict[str, object]: ...

    def send(self, approved: Approved) -> SentJob:
        """Start the job, once, also if an answer is lost."""


class Jobs(Protocol):
    """Jobs without a pipeline, in one project and region of a platform."""

    @property
    def endpoint(self) -> str:
        """The address that requests are sent to."""

    def connect(self) -> None:
        """Raise UserError unless requests to that project may be sent from this machine. Nothing is sent."""

    def request(
        self, spec: CustomJobMessage, *, display_name: str, labels: Mapping[str, str], encryption_key: str = ""
    ) -> JobRequest: ...


@dataclass(frozen=True)
class SearchOrder:
    """A search to submit, whose folder holds the files that its trials share."""

    config: RunConfig
    tune: TuneConfig
    search_id: str
    trial: CustomJobSpec  # of every trial, without its values


class SearchRequest(Protocol):
    """A search, whole, before it is sent."""

    def as_dict(self) -> dict[str, object]: ...

    def send(self, approved: Approved) -> str:
        """Start the search, once, also if an answer is lost. Returns its name on the service."""


class Published(Protocol):
    """A pipeline in a registry of pipelines after `publish`."""

    def lines(self) -> list[str]: ...
    def as_json(self) -> dict[str, object]: ...


class Look(NamedTuple):
    """A platform's answer to `vlmpipe check` in one line."""

    state: Literal["ok", "warning", "unchecked"]
    text: str


class Platform(ABC):
    """Where pipelines and their jobs run.

    name: as --target and a run's records have it. title: for people.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    is_here: ClassVar[bool] = False  # runs are processes of this machine, started by `vlmpipe run`
    has_prices: ClassVar[bool] = False  # machines are paid for by the hour, at prices that are known here
    takes_jobs: ClassVar[bool] = False  # starts custom jobs without a pipeline
    max_step_bytes: ClassVar[int | None] = None  # of what a step takes and hands on; None: no limit is known

    # rules of a run file

    @abstractmethod
    def check(self, config: RunConfig) -> None:
        """Raise RunFileError when the run file lacks what this platform needs, or asks for what it cannot do."""

    @abstractmethod
    def check_files(self, config: RunConfig) -> None:
        """Raise RunFileError unless jobs there can read the run's files. A pipeline can be compiled without."""

    def missing(self, config: RunConfig) -> Iterator[Problem]:
        """Yield the problems that keep the run file from running there."""
        for check in (self.check, self.check_files):
            try:
                check(config)
            except RunFileError as error:
                yield from error.problems

    def look(self, config: RunConfig) -> Look | None:
        """Return the line of `vlmpipe check` for the run file; None for no line."""
        return None

    def unused(self, config: RunConfig) -> list[Problem]:
        """Settings of the run file that have no effect there, each with what applies instead."""
        return []

    def unready(self, config: RunConfig) -> Iterator[Problem]:
        """Fields that a run there could not use: files of this machine, and the shipped examples' values."""
        try:
            self.check_files(config)
        except RunFileError as error:
            yield from error.problems

    @abstractmethod
    def root_uri(self, config: RunConfig) -> str:
        """Root of runs, prepared data, features and the registry: `output.root_uri` where it is reached from there."""

    # the graph

    @abstractmethod
    def graph(self) -> Graph:
        """How steps and jobs of the pipeline are made for it. Needs kfp."""

    # inside a step

    @abstractmethod
    def run_job(self, order: JobOrder) -> str:
        """Run the job and watch it to its end; returns its `gcp_resources`.

        Raises UserError with the job's exit code where it fails.
        """

    def job_place(self, run_file: Mapping[str, object]) -> dict[str, str]:
        """Where its service knows the pipeline job of this step, in fields of `Holder`: what `is_over` is given."""
        return {}

    def is_over(self, job_name: str, place: Mapping[str, str]) -> bool | None:
        """Ask its service whether a pipeline job has ended; None where `place` does not say where to ask."""
        return None

    def deploy(
        self, run_uri: str, run: RunSettings, registered: Registered, questions: Sequence[ValidationQuestion]
    ) -> tuple[Agreement, dict[str, object]]:
        """Serve a registered model, ask it `questions`, and keep it where it answers as it was evaluated.

        Args:
            run: settings of the run.
            registered: the version in the registry.

        Returns how well the answers agree, and what the record says of the endpoint. Raises UserError (76) where they
        do not, and others where the endpoint refuses; the endpoint is as before then.
        """
        self._refuse("deploys no model", "a run file without deploy")

    # runs

    @abstractmethod
    def find(self, name: str, *, root: str, project: str, location: str) -> Run | None:
        """The run or job called `name`; None where nothing shows that it is there.

        Args:
            root: output.root_uri of runs on this machine.
            project: where to look for a job that is only named by its id, as location.
        """

    def run_in(self, folder: Path) -> Run:
        """The run whose files are in a folder of this machine."""
        self._refuse("has no runs in folders of this machine", "a platform that is here")

    def find_search(self, name: str, root: str) -> SearchRun | None:
        """The search called `name`; None where nothing shows that it is there."""
        return None

    def submit(self, order: Order) -> Submitted:
        """Plan, compile, check, confirm and send. Everything that can fail comes before the confirmation.

        Raises UserError where the run was not started, or where that is not known, which the message says.
        """
        self._refuse("starts no runs by submit", "vlmpipe run")

    # jobs without a pipeline, of a platform with takes_jobs

    def jobs(self, project: str, location: str, service_account: str = "") -> Jobs:
        """Jobs in that project and region. `service_account` is theirs, for errors about permissions."""
        self._refuse("starts no jobs without a pipeline", "a run of the whole pipeline there")

    def search(self, order: SearchOrder) -> SearchRequest:
        """The request for a search, of a platform that searches by itself."""
        self._refuse("searches no settings by itself", "vlmpipe tune --target local")

    # pipelines that others start

    def fetch(self, address: str, folder: Path) -> Template:
        """Fetch a published pipeline into `folder`."""
        self._refuse(f"has no published pipeline {address}", f"a run file for {self.title}")

    def publisher(self, registry: str, tags: Sequence[str]) -> tuple[str, Callable[[RunConfig, Compiled], Published]]:
        """Where compiled pipelines are published, and a function that does. Raises ConfigError for a wrong tag."""
        self._refuse("takes no published pipelines", "a platform with a registry of pipelines")

    def schedules(self, config: RunConfig) -> Schedules[Any]:
        """The schedules where the run file's is. Raises ConfigError where the run file does not say where."""
        self._refuse("has no schedules", "a platform that starts runs by itself")

    def wanted_schedule(
        self,
        config: RunConfig,
        settings: ScheduleConfig,
        template: Template | None,
        compile: Callable[[RunConfig, Path], Compiled],
    ) -> tuple[RunSchedule, Path]:
        """The schedule of the run file, and its compiled pipeline."""
        self._refuse("has no schedules", "a platform that starts runs by itself")

    def meanwhile(self, settings: ScheduleConfig) -> str:
        """Policy for runs that are due while too many are active."""
        return ""

    def check_storage(self, config: RunConfig) -> list[str]:
        """Look at the storage that runs need before one is sent. Returns checks that were not possible."""
        return []

    def _refuse(self, actual: str, expected: str) -> NoReturn:
        raise ConfigError(f"{self.title} {actual}", expected=expected)
