"""Loads the files of a run for its report, and formats their values. A missing or damaged file becomes a note."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vlmpipe.records.decision import Decision
from vlmpipe.records.plan import PlannedRun
from vlmpipe.records.registered import Registered
from vlmpipe.trainer.data.rejects import KEPT, SUMMARY
from vlmpipe.trainer.data.shards.prepared_files import open_prepared, why_unread
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.metrics import FILE as METRICS_FILE
from vlmpipe.trainer.records.prepared import CHANGES_FILE, DataPointers
from vlmpipe.trainer.records.record import Record
from vlmpipe.trainer.records.step import FOLDER, StepRecord, parse_step, step_of_file
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import unseal

R = TypeVar("R", bound=Record)
STEP_ORDER = (
    "resolve-run", "choose-replay", "replay", "plan-data", "prepare-chunks", "prepare-data", "cache-features",
    "train", "sync-checkpoint",
    "evaluate", "benchmark", "audit", "decide", "register-model", "deploy-model", "notify",
)  # fmt: skip


@dataclass
class RunFiles:
    """The parsed files of one run. The field of a missing file is empty, and `missing` has the reason."""

    run_uri: str
    run_id: str
    config: dict[str, object] = field(default_factory=dict)
    plan: PlannedRun | None = None
    steps: list[StepRecord] = field(default_factory=list)
    metrics: list[dict[str, object]] = field(default_factory=list)
    summary: Summary = field(default_factory=Summary)
    profiles: list[dict[str, object]] = field(default_factory=list)  # of each profiled rank
    evaluation: Evaluation = field(default_factory=Evaluation)
    predictions: list[dict[str, object]] = field(default_factory=list)
    relevance_maps: list[dict[str, Any]] = field(default_factory=list)
    decision: Decision | None = None
    registered: Registered | None = None
    diagnosis: dict[str, object] = field(default_factory=dict)  # of a run on this machine that failed or was stopped
    prepared: DataPointers | None = None
    changes: dict[str, object] = field(default_factory=dict)
    stats: dict[str, object] = field(default_factory=dict)
    rejects: dict[str, object] = field(default_factory=dict)
    rejects_uri: str = ""  # folder of their images
    contact_sheet: dict[str, object] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


class _Reader:
    """Reads JSON and JSON lines from one folder and notes in `missing` what cannot be read."""

    def __init__(self, store: Storage, missing: dict[str, str]) -> None:
        self.store, self.missing = store, missing

    def content(self, name: str, writer: str) -> dict[str, object]:
        data = self._bytes(name, writer)
        if data is None:
            return {}
        try:
            content = unseal(data)
        except ValueError as error:
            self.missing[name] = f"{name} cannot be read: {error}."
            return {}
        return content

    def record(self, kind: type[R]) -> R | None:
        """Read a record that every run has in the end; None where it is missing or cannot be read."""
        content = self.content(kind.FILE, kind.STEP)
        try:
            return kind.of(content, kind.FILE) if content else None
        except UserError as error:
            self.missing[kind.FILE] = f"{error.found}."
            return None

    def lines(self, name: str, writer: str) -> list[dict[str, object]]:
        """All whole lines. Damaged ones are counted, not fatal."""
        data = self._bytes(name, writer)
        if data is None:
            return []
        lines, bad = [], 0
        for line in data.splitlines():
            try:
                lines.append(unseal(line))
            except ValueError:
                bad += 1
        if bad:
            self.missing[name] = f"{bad} of {bad + len(lines)} lines of {name} cannot be read and are left out."
        return lines

    def optional(self, name: str, writer: str) -> dict[str, object]:
        """Read the object of a file that not every run has; without a note if it is absent."""
        return self.content(name, writer) if self.store.stat(name) else {}

    def _bytes(self, name: str, writer: str) -> bytes | None:
        if self.store.stat(name) is None:
            self.missing[name] = f"There is no {name}: the step {writer} did not get that far."
            return None
        try:
            return self.store.read(name)
        except UserError as error:
            self.missing[name] = f"{name} cannot be read: {error.found}."
            return None


def read_run(run_uri: str) -> RunFiles:
    """Read the run folder and the prepared data it points to.

    Raises UserError when `run_uri` is empty.
    """
    missing: dict[str, str] = {}
    run = _Reader(open_storage(run_uri), missing)
    if not run.store.list():
        raise UserError(f"no run in {run_uri}", expected="the folder of a run, with run.json", code=ExitCode.CONFIG)
    files = RunFiles(run_uri=run_uri, run_id=run_uri.rstrip("/").rpartition("/")[2], missing=missing)
    files.config = run.content("run.json", "resolve-run")
    files.plan = run.record(PlannedRun) if run.store.stat(PlannedRun.FILE) else None
    files.steps = _steps(run)
    files.metrics = _last_of_each_step(run.lines(METRICS_FILE, "train"))
    files.summary = run.record(Summary) or Summary()
    files.profiles = [run.content(name, "train") for name in sorted(_profiles(run))]
    files.evaluation = run.record(Evaluation) or Evaluation()
    files.predictions = run.lines("predictions.jsonl", "evaluate")
    if mapping(files.config.get("model")).get("relevance"):
        files.relevance_maps = [
            mapping(drawn) for drawn in sequence(run.content("relevance_maps.json", "evaluate").get("maps"))
        ]
    files.decision = run.record(Decision)
    files.prepared = run.record(DataPointers)
    files.changes = run.optional(CHANGES_FILE, "prepare-data")
    files.registered = run.record(Registered) if run.store.stat(Registered.FILE) else None
    files.diagnosis = run.optional("diagnosis.json", "run")
    files.rejects = run.optional(f"{KEPT}/{SUMMARY}", "prepare-data")  # all that a failed preparation leaves
    files.rejects_uri = run.store.uri(KEPT) if files.rejects else ""
    if files.prepared:
        files.rejects_uri = files.prepared.prepared_uri
        try:
            prepared = _Reader(open_prepared(files.prepared.prepared_uri), missing)
        except UserError as error:
            missing["prepared data"] = f"The prepared data cannot be read: {why_unread(error)}."
            return files
        files.stats = prepared.content("stats.json", "prepare-data")
        files.rejects = prepared.content("rejects_summary.json", "prepare-data")
        files.contact_sheet = prepared.content("contact_sheet.json", "prepare-data")
    return files


def read_metrics(run_uri: str) -> list[dict[str, object]]:
    """The metrics of a run's training, a line for each logged step; those that cannot be read are left out."""
    return _last_of_each_step(_Reader(open_storage(run_uri), {}).lines(METRICS_FILE, "train"))


def _profiles(run: _Reader) -> list[str]:
    names = [info.name for info in run.store.list("profile")]
    return [name for name in names if name.endswith(".json")]


def _steps(run: _Reader) -> list[StepRecord]:
    """Step records of the last attempt, which began with resolve-run, in the graph's order; unknown steps come last."""
    names = [info.name for info in run.store.list(FOLDER) if info.name.endswith(".json")]
    contents = {name: run.content(name, "that it is named after") for name in names}
    known = [record for name, content in contents.items() if (record := parse_step(step_of_file(name), content))]
    rank = {name: index for index, name in enumerate(STEP_ORDER)}
    first_s = next((record.started_s for record in known if record.step == "resolve-run"), 0.0)
    known = [record for record in known if record.started_s >= first_s]
    # prepare-chunks runs several times, each with a number at the end of its name.
    return sorted(known, key=lambda record: (rank.get(record.step.rstrip("-0123456789"), len(rank)), record.step))


def _last_of_each_step(lines: Iterable[dict[str, object]]) -> list[dict[str, object]]:
    """One line of each step: a resumed run logs some twice, and the last one counts."""
    by_step = {step: line for line in lines if (step := number(line.get("step"))) is not None}
    return [by_step[step] for step in sorted(by_step)]


def number(value: object) -> float | None:
    """`value` as a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def mapping(value: object) -> dict[str, object]:
    """Return `value` if an object, else an empty object."""
    return value if isinstance(value, dict) else {}


def sequence(value: object) -> list[object]:
    """Return `value` if a list, else an empty list."""
    return value if isinstance(value, list) else []


def column(lines: Iterable[dict[str, object]], name: str) -> list[tuple[float, float]]:
    """(step, value) of each line with a finite value."""
    pairs = ((number(line.get("step")), number(line.get(name))) for line in lines)
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def flatten(content: object, prefix: str = "") -> list[tuple[str, object]]:
    """Dotted names and plain values of a nested object, in its order; an empty object or list is a value."""
    if not isinstance(content, dict) or not content:
        return [(prefix, content)]
    rows: list[tuple[str, object]] = []
    for name, value in content.items():
        rows += flatten(value, f"{prefix}.{name}" if prefix else str(name))
    return rows


def count(value: object) -> str:
    """A whole number with thousands separated, any other number with four digits; "" for other values."""
    plain = number(value)
    if plain is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{plain:.4g}"


def percent(value: float | None) -> str:
    """A share as people read it."""
    return "not measured" if value is None else f"{100 * value:.1f}%"


def duration(value: object) -> str:
    """Seconds as 0.4 s, 12 s, 2 min 5 s or 3 h 20 min; "" for other values."""
    seconds = number(value)
    if seconds is None:
        return ""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
