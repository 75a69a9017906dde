"""The runs that are compared: found by their names, and read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmpipe.platforms.short_names import full_name
from vlmpipe.records.plan import PlannedCost, PlannedRun
from vlmpipe.registry.recorded_answers import PREDICTIONS, known_image_groups
from vlmpipe.runs.folders.summary import find_run
from vlmpipe.runs.submitted import submitted_record
from vlmpipe.trainer.config.benchmarks import ANSWERS_FOLDER
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.records.step import read_steps
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage, in_bucket, join_uri
from vlmpipe.trainer.storage.records import RUN_FILE, read_lines, read_record

REGISTERED = re.compile(r"([A-Za-z0-9][\w.-]*)@([a-z][a-z0-9-]*|[1-9][0-9]*)")  # MODEL@ALIAS or MODEL@VERSION
HOUR_S = 3600


@dataclass(frozen=True)
class Usage:
    """Time and cost of a run. None: not recorded.

    hours: from the start of its first step to the end of its last, and of earlier starts of training. train_hours: of
    training, all its starts. tokens: that training read, those of steps that were made again too.
    starts: of training; steps_repeated: lower bound of the steps that were made twice, after interruptions.
    usd: measured time of its jobs, at the hourly prices that its plan had; planned_usd: what the plan said.
    """

    hours: float | None = None
    train_hours: float | None = None
    tokens: int | None = None
    starts: int | None = None
    steps_repeated: int | None = None
    usd: float | None = None
    planned_usd: float | None = None


@dataclass(frozen=True)
class Side:
    """An evaluated run. `name` is what it is called in tables: its id, or what the user called it.

    image_groups: by sample, a name of its images; empty where that is not known.
    """

    name: str
    run_id: str
    run_uri: str
    prepared_uri: str
    predictions: list[dict[str, Any]]
    evaluation: Evaluation
    usage: Usage
    settings: Mapping[str, object]  # run.json as it was written, by any version
    image_groups: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)  # of packages that training ran with

    def benchmark(self, name: str) -> list[dict[str, object]]:
        """The answers to a benchmark's questions."""
        return read_lines(open_storage(self.run_uri), f"{ANSWERS_FOLDER}/{name}.jsonl")


def read_sides(names: Sequence[str], root: str) -> list[Side]:
    """The runs of these names: ids under `root`, folders, gs:// addresses, MODEL@ALIAS or MODEL@VERSION of a registry.

    Raises ConfigError for too few names or a run without an evaluation, UserError where there is none of that name.
    """
    if len(set(names)) < max(2, len(names)):
        raise ConfigError(
            "a run is named twice" if len(names) > 1 else "one run is named" if names else "no run is named",
            expected="two or more different runs: vlmpipe compare RUN RUN...",
        )
    uris = {name: _run_uri(name, root) for name in names if not REGISTERED.fullmatch(name)}
    if versions := [name for name in names if REGISTERED.fullmatch(name)]:
        uris |= _registered_uris(versions, list(uris.values()), root)
    ids = [_run_id(uris[name]) for name in names]
    return [
        _side(run_id if REGISTERED.fullmatch(name) is None and ids.count(run_id) == 1 else name, uris[name])
        for name, run_id in zip(names, ids, strict=True)
    ]


def run_uri_named(name: str, root: str) -> str:
    """The folder of one run, by a name as `read_sides` takes them."""
    return _registered_uris([name], [], root)[name] if REGISTERED.fullmatch(name) else _run_uri(name, root)


def _registered_uris(versions: Sequence[str], run_uris: Sequence[str], root: str) -> dict[str, str]:
    """The folders of registered versions' runs, by name. `run_uris`: of the runs that they are compared with."""
    # It imports the run file's sections, which a comparison of runs needs for nothing else.
    from vlmpipe.comparison.registered_runs import registered_run_uri, settings_of

    settings, names = [settings_of(uri) for uri in run_uris], [version.partition("@") for version in versions]
    return {f"{model}@{which}": registered_run_uri(model, which, settings, root) for model, _, which in names}


def _run_id(run_uri: str) -> str:
    return run_uri.rstrip("/").rpartition("/")[2]


def _run_uri(name: str, root: str) -> str:
    if in_bucket(name):
        return name.rstrip("/")
    name = full_name(name, root)
    folders = (Path(name), Path(join_uri(root, "runs"), name))
    run_folder = next((folder for folder in folders if (folder / "run.json").is_file()), None)
    return str(run_folder or submitted_record(name).get("run_uri") or find_run(root, name).folder)


def _side(name: str, run_uri: str) -> Side:
    store = open_storage(run_uri)
    for file, step in (
        (PREDICTIONS, "evaluate"),
        (Evaluation.FILE, Evaluation.STEP),
        (DataPointers.FILE, DataPointers.STEP),
    ):
        if store.stat(file) is None:
            raise ConfigError(
                f"{name} has no {file}, which the step {step} writes: {store.uri(file)} is missing",
                expected="runs that were evaluated, and whose folders are still there",
                fix="let the run come to its end; of a run with an evaluate_command only its own figures are known",
            )
    predictions = read_lines(store, PREDICTIONS)
    return Side(
        name,
        _run_id(run_uri),
        run_uri,
        DataPointers.read(store).prepared_uri,
        predictions,
        Evaluation.read(store),
        _usage(store),
        read_record(store, RUN_FILE),
        known_image_groups(store, predictions),
        (Summary.read_if_there(store) or Summary()).versions,
    )


def _usage(store: Storage) -> Usage:
    steps = read_steps(store)
    times = {step.step: (step.started_s, step.ended_s) for step in steps if step.started_s and step.ended_s}
    took = {step: (ended - began) / HOUR_S for step, (began, ended) in times.items()}
    first, last = (
        min((began for began, _ in times.values()), default=0.0),
        max((e for _, e in times.values()), default=0.0),
    )
    summary = Summary.read_if_there(store) or Summary()
    earlier = 0.0
    if "train" in took:
        of_starts = (summary.wall_s or 0.0) / HOUR_S
        earlier = max(0.0, of_starts - took["train"])  # the step's record begins with the last start
        took["train"] += earlier
    plan = PlannedRun.read_if_there(store)
    cost = plan.cost if plan and plan.cost else PlannedCost()
    return Usage(
        (last - first) / HOUR_S + earlier if times else None,
        took.get("train"),
        summary.tokens,
        summary.starts,
        summary.steps_repeated,
        _measured_usd(cost, took),
        cost.usd,
    )


def _measured_usd(cost: PlannedCost, hours: dict[str, float]) -> float | None:
    """Hours of the jobs at the plan's prices; None where a job that ran has no price."""
    prices = {step.job.replace("_", "-"): step.usd_per_hour for step in cost.steps}
    ran = {job: price for job, price in prices.items() if job in hours}
    if not ran or any(price is None for price in ran.values()):
        return None
    return sum(hours[job] * (price or 0.0) for job, price in ran.items())
