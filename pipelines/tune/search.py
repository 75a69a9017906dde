"""`vlmpipe tune`: a search over fields of train and adapters, by a platform that searches, or on this machine.

Both run the same CustomJob for a trial: `vlmpipe.trainer.trials.tune`, on the data and features of one earlier run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.config.overrides import apply_overrides
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.config.sections.tune import OF_ADAPTERS, ParameterSpec, TuneConfig, Value
from vlmpipe.job_spec.build import trials_order
from vlmpipe.job_spec.check import check_job_spec
from vlmpipe.job_spec.order import JobOrder
from vlmpipe.platforms.base import SearchOrder, SearchRequest
from vlmpipe.platforms.table import DEFAULT, here, platform_of
from vlmpipe.runs.folders.search import LocalSearch
from vlmpipe.runs.searches import SEARCH_FILE, TABLE, Trial, ranked
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.monitoring.hypertune import VALIDATION_LOSS
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage, join_uri
from vlmpipe.trainer.storage.records import read_record

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SHARED = ("data", "model", "features")  # sections that trials take over from the run, with its prepared data


@dataclass(frozen=True)
class Search:
    """A search that is about to start, with the files that its trials share."""

    config: RunConfig
    tune: TuneConfig
    search_id: str
    uri: str
    files: Mapping[str, bytes]  # of its folder

    def write(self) -> None:
        """Create the search's folder."""
        store = open_storage(self.uri)
        for name, data in self.files.items():
            store.write(name, data)


class SearchStoppedError(UserError):
    """A search on this machine was asked to stop. `trials` are those that had ended."""

    def __init__(self, search_id: str, trials: Sequence[Trial], num_trials: int) -> None:
        self.trials = tuple(trials)
        super().__init__(
            f"search {search_id} was stopped: {len(trials)} of {num_trials} trials had ended",
            fix="the same command continues it, with the trial that was stopped from its last checkpoint; "
            "--fresh starts a new search",
            code=ExitCode.INTERRUPTED,
        )


def require_tuning(config: RunConfig) -> TuneConfig:
    """The section tune. Raises ConfigError where an end of a range makes an invalid run file."""
    if config.tune is None:
        raise ConfigError("the run file has no section tune", fix="add one: vlmpipe docs compare-runs")
    if config.tune.metric == VALIDATION_LOSS and not config.train.validate_every_steps:
        raise ConfigError(
            f"tune.metric is {VALIDATION_LOSS}, and train.validate_every_steps is 0: trials would be compared by a few "
            "sequences, once",
            fix="set train.validate_every_steps",
        )
    if config.model.lora is None and (
        names := [parameter for parameter in config.tune.parameters if parameter in OF_ADAPTERS]
    ):
        raise ConfigError(
            f"tune.parameters has {', '.join(names)}, and the run file has no model.lora",
            expected="adapters, whose size is searched",
            fix="set model.lora, for example model.lora={rank: 16}, or search fields of train",
        )
    for name, spec in config.tune.parameters.items():
        for value in spec.extremes:
            content = apply_overrides(config.to_dict(), {name: value})
            parse_run_config(content, f"run file with tune.parameters {name}={value}")
    return config.tune


def dearest_trial(config: RunConfig) -> RunConfig:
    """The run file with that value of each searched field whose plan costs most, of numbers one of the ends. Values of
    which the plan says that they fail are left out."""
    from vlmpipe.planner.plan import plan_run

    assert config.tune
    dearest = config
    for name, spec in config.tune.parameters.items():
        values = spec.points if spec.categorical_value_spec else [spec.points[0], spec.points[-1]]
        by_cost = {0.0: dearest}
        for value in values:
            with contextlib.suppress(UserError):  # a trial with values that do not go together fails, and costs nothing
                trial = parse_run_config(apply_overrides(dearest.to_dict(), {name: value}), "a trial")
                plan = plan_run(trial)
                if plan.state != "red":  # a cost that is not known may be any
                    by_cost[math.inf if plan.cost is None or plan.cost.usd is None else plan.cost.usd] = trial
        dearest = by_cost[max(by_cost)]
    return dearest


def open_search(config: RunConfig, from_run: str, search_id: str, root_uri: str) -> Search:
    """Check the search and read the files that trials share; nothing is written.

    Raises ConfigError for a run that has not trained, or whose data or model are not the run file's.
    """
    tuning = require_tuning(config)
    for text in (from_run, search_id):
        if not RUN_ID.fullmatch(text):
            raise ConfigError(f"{text!r} cannot be a run's id", expected="letters, digits, dots, dashes, underscores")
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"capacity_fallback": ()})})
    base = open_storage(join_uri(root_uri, "runs", from_run))
    if base.stat(DataPointers.FILE) is None or base.stat(Summary.FILE) is None:
        raise ConfigError(
            f"run {from_run} has not trained: no prepared.json and summary.json in {base.root_uri}",
            expected="a run whose data is prepared and whose features are encoded",
            fix="run the pipeline once, train.max_steps=1 is enough, and name that run with --from",
        )
    paths = RunPaths(run_id=search_id, root_uri=root_uri if "://" in root_uri else open_storage(root_uri).root_uri)
    content, before = config.to_run_json(paths), read_record(base, "run.json")
    for section in SHARED:
        ours, its = ({**side[section]} for side in (content, before))
        if section == "features":
            ours["cache"] = its["cache"]  # auto is decided in the run's own file
        if ours != its:
            raise ConfigError(
                f"section {section} differs from that of run {from_run}, whose data trials share",
                fix="tune from a run of the same run file",
            )
        content[section] = its
    run_json = json.dumps(content, indent=1, ensure_ascii=False).encode()
    search_file = _search_file(tuning, f"{from_run} {config.digest()}")
    prepared = DataPointers.read(base).sealed()
    files = {DataPointers.FILE: prepared, "run.json": run_json, SEARCH_FILE: search_file}
    return Search(config, tuning, search_id, paths.run_uri, files)


def unfinished_search(search: Search, root_uri: str) -> str:
    """The id of the newest search on this machine of the same run file and run that was stopped; empty without one."""
    if "://" in root_uri:
        return ""
    settings = json.loads(search.files[SEARCH_FILE])["settings"]
    searches = (LocalSearch(path.parent) for path in Path(search.uri).parent.glob(f"*/{SEARCH_FILE}"))
    stopped = [
        search.name for search in searches if search.settings == settings and search.status().outcome == "stopped"
    ]
    return max(stopped, default="")


def _search_file(tuning: TuneConfig, settings: str) -> bytes:
    """Content of SEARCH_FILE, which `vlmpipe status` needs beside the table of trials.

    `settings` is equal for searches that are continued by each other.
    """
    content = {"metric": tuning.metric, "goal": tuning.goal, "max_failed_trial_count": tuning.max_failed_trial_count}
    return json.dumps({**content, "num_trials": num_points(tuning), "settings": settings}, indent=1).encode()


def trial_order(search: Search) -> JobOrder:
    """The order of every trial's job, without the trial's values. Raises ConfigError for one that Vertex AI refuses."""
    arguments = ["--config", join_uri(search.uri, "run.json"), "--metric", search.tune.metric]
    order = trials_order(search.config, search.uri, "vlmpipe.trainer.trials.tune", arguments)
    check_job_spec(order.spec(), region=search.config.gcp.location if search.config.gcp.project else "")
    return order


def request_of(search: Search, target: str = DEFAULT) -> SearchRequest:
    """The search as a request to a platform that searches by itself."""
    order = SearchOrder(search.config, search.tune, search.search_id, trial_order(search).spec())
    return platform_of(target).search(order)


def run_search(search: Search) -> list[Trial]:
    """Run the trials on this machine, one after the other; writes `trials.json` after each. The table, best first.

    Trials that have ended before are not run again. A request to stop ends the search: SearchStoppedError.
    """
    from vlmpipe.runs.folders.lock import take_lock

    store = open_storage(search.uri)
    table = [Trial(**record) for record in json.loads(store.read(TABLE))] if store.stat(TABLE) else []
    lock = None
    try:
        lock = take_lock(Path(search.uri)) if "://" not in search.uri else None  # shows others that it is running
        _run_trials(search, store, table)
    except KeyboardInterrupt:  # between trials: a trial's own processes are stopped by run_job
        raise SearchStoppedError(search.search_id, table, num_points(search.tune)) from None
    finally:
        if lock is not None:
            os.close(lock)
    return ranked(table, search.tune.goal)


def _run_trials(search: Search, store: Storage, table: list[Trial]) -> None:
    from vlmpipe.job_spec.worker_pools import STEP_LABEL
    from vlmpipe.trainer.monitoring.hypertune import METRIC_FILE_VARIABLE, TRIAL_VARIABLE

    platform, ended = here(), {trial.trial for trial in table}
    for number, values in enumerate(points(search.tune), start=1):
        if number in ended:
            continue
        order, folder = trial_order(search), join_uri(search.uri, f"trial-{number}")
        metric_file = join_uri(folder, "metric.json")
        for pool in order.worker_pool_specs[:2]:
            container = pool["container_spec"]
            container["args"] = [*container["args"], *(f"--{name}={value}" for name, value in values.items())]
            container["env"] = [
                *container.get("env", []),
                {"name": TRIAL_VARIABLE, "value": str(number)},
                {"name": METRIC_FILE_VARIABLE, "value": metric_file},
            ]
        labels, name = {STEP_LABEL: "trial"}, f"{search.search_id}-trial-{number}"
        order = dataclasses.replace(order, display_name=name, labels=labels, base_output_directory=folder)
        begun_s, error = time.monotonic(), ""
        metric: float | None = None
        try:
            platform.run_job(order)
            line = json.loads(open_storage(folder).read("metric.json").splitlines()[-1])
            metric = float(line[search.tune.metric])
        except UserError as failure:
            if failure.code == ExitCode.PREEMPTED:
                raise SearchStoppedError(search.search_id, table, num_points(search.tune)) from None
            error = failure.found.splitlines()[0]
        state = "failed" if metric is None else "done"
        table.append(Trial(number, values, metric, error, state, round(time.monotonic() - begun_s, 1)))
        store.write(TABLE, json.dumps([dataclasses.asdict(trial) for trial in table], indent=1).encode())
        failed = sum(trial.metric is None for trial in table)
        if search.tune.max_failed_trial_count and failed >= search.tune.max_failed_trial_count:
            break


def num_points(tuning: TuneConfig) -> int:
    """Number of trials: a small grid has fewer points than `max_trial_count`."""
    if tuning.algorithm != "GRID_SEARCH":
        return tuning.max_trial_count
    return min(tuning.max_trial_count, math.prod(len(choice) for choice in _choices(tuning)))


def _choices(tuning: TuneConfig) -> list[Sequence[Value]]:
    """Values of each parameter that a grid can reach: a range may have more than fit into memory."""
    return [parameter.points[: tuning.max_trial_count] for parameter in tuning.parameters.values()]


def points(tuning: TuneConfig) -> Iterator[dict[str, Value]]:
    """The values of each trial on this machine. Raises ConfigError for an algorithm that only Vertex AI has."""
    if tuning.algorithm == "ALGORITHM_UNSPECIFIED":
        raise ConfigError(
            "tune.algorithm is ALGORITHM_UNSPECIFIED, which is Vertex AI's own search",
            expected="GRID_SEARCH or RANDOM_SEARCH on this machine",
            fix="add tune.algorithm=RANDOM_SEARCH, or --target vertex",
        )
    if tuning.algorithm == "GRID_SEARCH":
        grid = (dict(zip(tuning.parameters, point, strict=True)) for point in itertools.product(*_choices(tuning)))
        return itertools.islice(grid, tuning.max_trial_count)
    generator = random.Random(tuning.seed)
    return (
        {name: value_at(spec, generator.random()) for name, spec in tuning.parameters.items()}
        for _ in range(tuning.max_trial_count)
    )


def value_at(spec: ParameterSpec, share: float) -> Value:
    """The value at `share` (0 <= share < 1) of the parameter's values or range."""
    ends = spec.range
    if not ends or (spec.integer_value_spec and spec.scale_type == "UNIT_LINEAR_SCALE"):
        return spec.points[int(share * len(spec.points))]
    low, high = float(ends.min_value), float(ends.max_value)
    if spec.scale_type == "UNIT_LINEAR_SCALE":
        value = low + share * (high - low)
    elif spec.scale_type == "UNIT_LOG_SCALE":
        value = low * (high / low) ** share
    else:
        value = low + high - low * (high / low) ** (1 - share)
    value = min(max(value, low), high)
    return round(value) if spec.integer_value_spec else value
