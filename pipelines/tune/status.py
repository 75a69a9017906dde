"""`vlmpipe status` and `cancel` of a search, here or on Vertex AI: its trials, and the table that shows them."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vlmpipe.config.sections.tune import Value
from vlmpipe.platforms.local.runs.run import is_running, stopper
from vlmpipe.platforms.vertex.client import Place
from vlmpipe.runs.run_state import RunState
from vlmpipe.runs.steps import Step
from vlmpipe.runs.submitted import submitted_record
from vlmpipe.trainer.errors import ConfigError, ExitCode
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.records import read_record_file

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import types as api

SEARCH_FILE = "search.json"  # in a search's folder: its metric, its goal and its number of trials
TABLE = "trials.json"
_RESOURCE = re.compile(r"projects/([^/]+)/locations/([^/]+)/hyperparameterTuningJobs/([^/?]+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
OUTCOMES = {
    "QUEUED": "waiting", "PENDING": "waiting", "RUNNING": "running", "CANCELLING": "stopping", "PAUSED": "paused",
    "SUCCEEDED": "done", "PARTIALLY_SUCCEEDED": "done", "FAILED": "failed", "EXPIRED": "failed", "CANCELLED": "stopped",
}  # fmt: skip
TRIAL_STATES = {
    "REQUESTED": "waiting", "ACTIVE": "running", "STOPPING": "running", "SUCCEEDED": "done", "INFEASIBLE": "failed",
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One line of the table. `metric` is None for a trial that has not reported it, or failed."""

    trial: int
    values: dict[str, Value]
    metric: float | None
    error: str = ""
    state: str = "done"  # waiting, running, done or failed
    elapsed_s: float = 0.0

    @property
    def settings(self) -> str:
        """The values, as overrides of a run file."""
        shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in self.values.values())
        return " ".join(f"{name}={value}" for name, value in zip(self.values, shown, strict=True))


def ranked(trials: Iterable[Trial], goal: str) -> list[Trial]:
    """The best first, those without a metric last. `goal` is MAXIMIZE or MINIMIZE."""
    sign = -1 if goal == "MAXIMIZE" else 1
    return sorted(trials, key=lambda one: (math.inf if one.metric is None else sign * one.metric, one.trial))


def table_lines(trials: Sequence[Trial], metric: str) -> list[str]:
    """For people: a line for each, under a title."""
    lines = [f"{'trial':>5}  {metric:>12}  values"]
    for one in trials:
        shown = f"{one.metric:.4f}" if one.metric is not None else f"{one.state}: {one.error}".rstrip(": ")
        lines.append(f"{one.trial:>5}  {shown:>12}  {one.settings}")
    return lines


def as_steps(search_id: str, trials: Iterable[Trial], metric: str) -> RunState:
    """The trials by number, as the steps of a run for a view."""

    def step(one: Trial) -> Step:
        found = f"{metric} {one.metric:.4f}, " if one.metric is not None else ""
        return Step(f"trial-{one.trial}", one.state, one.elapsed_s, message=f"{found}{one.error or one.settings}")

    return RunState(search_id, tuple(map(step, sorted(trials, key=lambda one: one.trial))))


@dataclass(frozen=True)
class SearchStatus:
    """State of a search. The trials come best first."""

    search_id: str
    uri: str
    outcome: str  # waiting, running, stopping, paused, done, stopped or failed
    metric: str
    goal: str
    num_trials: int  # planned
    trials: tuple[Trial, ...]
    error: str = ""
    resource_name: str = ""  # empty for one on this machine
    console_url: str = ""
    decision: ClassVar[None] = None  # a search alone has no gate

    @property
    def state(self) -> RunState:
        return as_steps(self.search_id, self.trials, self.metric)

    @property
    def is_over(self) -> bool:
        return self.outcome in ("done", "stopped", "failed")

    @property
    def best(self) -> Trial | None:
        return next((one for one in self.trials if one.metric is not None), None)

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the search runs. One without a result has failed."""
        if not self.is_over:
            return None
        if self.outcome == "stopped":
            return int(ExitCode.PREEMPTED)
        return int(ExitCode.OK if self.outcome == "done" and self.best else ExitCode.UNEXPECTED)

    def lines(self) -> list[str]:
        """For people."""
        ended = sum(one.state in ("done", "failed") for one in self.trials)
        lines = [f"search {self.search_id}: {self.outcome}, {ended} of {self.num_trials} trials ended"]
        lines += [f"  error     {self.error}"] if self.error else []
        lines += table_lines(self.trials, self.metric) if self.trials else []
        table = {"trials": f"{self.uri}/trial-N" if self.uri else "", "job": self.resource_name}
        table["console"] = self.console_url
        if self.resource_name and not self.is_over:
            table["to stop"] = f"vlmpipe cancel {self.search_id}"
        return lines + [f"  {name:<9} {value}" for name, value in table.items() if value]

    def as_json(self) -> dict[str, Any]:
        fields = ("search_id", "uri", "outcome", "exit_code", "metric", "goal", "num_trials")
        more = ("error", "resource_name", "console_url")
        return {
            **{name: getattr(self, name) for name in fields},
            **{name: getattr(self, name) or None for name in more},
            "trials": [vars(one) for one in self.trials],
        }


@dataclass(frozen=True)
class LocalSearch:
    """A search on this machine."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def settings(self) -> str:
        """Equal for searches that are continued by each other."""
        return str(read_record_file(self.folder / SEARCH_FILE).get("settings", ""))

    def status(self) -> SearchStatus:
        search, table = read_record_file(self.folder / SEARCH_FILE), self.folder / TABLE
        lines = json.loads(table.read_text(encoding="utf-8")) if table.is_file() else []
        trials = ranked((Trial(**one) for one in lines), search["goal"])
        failed, most_failed = sum(one.metric is None for one in trials), search["max_failed_trial_count"]
        whole = len(trials) >= search["num_trials"] or 0 < most_failed <= failed
        outcome = "running" if is_running(self.folder) else "done" if whole else "stopped"
        return SearchStatus(
            self.name, str(self.folder), outcome, search["metric"], search["goal"], search["num_trials"], tuple(trials)
        )

    def cancel(self) -> bool:
        """Ask the process of `vlmpipe tune` to stop, as Ctrl-C does; False where it has just ended."""
        if not is_running(self.folder):
            raise ConfigError(f"search {self.name} is over", expected="a search that is running")
        owner = stopper(self.folder)
        if owner:
            owner.send_signal(signal.SIGINT)
        return owner is not None


@dataclass(frozen=True)
class VertexSearch:
    """A HyperparameterTuningJob. Errors of Google's client become UserErrors."""

    name: str
    place: Place
    number: str

    @property
    def resource_name(self) -> str:
        return f"{self.place.parent}/hyperparameterTuningJobs/{self.number}"

    def status(self) -> SearchStatus:
        return status_of_job(self._get(), self.name, self.place)

    def cancel(self) -> bool:
        """Ask the service to stop the search and its trials; see `cancel_job`."""
        from vlmpipe.platforms.vertex.client import job_client, translate_errors
        from vlmpipe.platforms.vertex.retries import send_request
        from vlmpipe.platforms.vertex.runs.client import USER, cancel_job

        client = job_client(self.place.location)

        def send() -> None:
            with translate_errors(self.place, role=USER, what="tuning job"):
                send_request(client.cancel_hyperparameter_tuning_job, name=self.resource_name)

        return cancel_job(f"search {self.name}", self.name, lambda: _state(self._get()), send)

    def _get(self) -> api.HyperparameterTuningJob:
        from vlmpipe.platforms.vertex.client import job_client, translate_errors
        from vlmpipe.platforms.vertex.retries import send_request
        from vlmpipe.platforms.vertex.runs.client import VIEWER

        client = job_client(self.place.location)
        with translate_errors(self.place, role=VIEWER, what="tuning job"):
            return send_request(client.get_hyperparameter_tuning_job, name=self.resource_name)


def _state(job: api.HyperparameterTuningJob) -> str:
    return str(job.state.name).removeprefix("JOB_STATE_")


def find_search(name: str, root: str) -> LocalSearch | VertexSearch | None:
    """The search called `name`: its id, its folder, or a tuning job's resource name. None for other names."""
    for folder in (Path(name), Path(join_uri(root, "runs", name))):
        if (folder / SEARCH_FILE).is_file():
            return LocalSearch(folder)
    record = submitted_record(name) if _NAME.fullmatch(name) else {}
    match = _RESOURCE.fullmatch(str(record.get("resource_name") or name))
    return VertexSearch(name, Place(match[1], match[2]), match[3]) if match else None


def status_of_job(job: api.HyperparameterTuningJob, name: str, place: Place) -> SearchStatus:
    """The search from the service's answer about its job."""
    wanted = job.study_spec.metrics[0]
    number = job.name.rpartition("/")[2]
    return SearchStatus(
        search_id=name if "/" not in name else job.display_name,
        uri=job.trial_job_spec.base_output_directory.output_uri_prefix,
        outcome=OUTCOMES.get(_state(job), "running"),
        metric=wanted.metric_id,
        goal=wanted.goal.name,
        num_trials=job.max_trial_count,
        trials=tuple(ranked((_trial(one, wanted.metric_id) for one in job.trials), wanted.goal.name)),
        error=job.error.message,
        resource_name=job.name,
        console_url=place.console_url(number, in_pipelines=False),
    )


def _trial(trial: api.Trial, metric: str) -> Trial:
    found = {one.metric_id: one.value for one in trial.final_measurement.metrics}
    state = TRIAL_STATES.get(trial.state.name, "running")
    values = {one.parameter_id: one.value for one in trial.parameters}
    end_s = trial.end_time.timestamp() if trial.end_time else time.time()
    elapsed_s = max(0.0, end_s - trial.start_time.timestamp()) if trial.start_time else 0.0
    return Trial(int(trial.id), values, found.get(metric), trial.infeasible_reason, state, elapsed_s)
