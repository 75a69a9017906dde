"""vlmpipe tune: the request for Vertex AI, a trial's folder and report, and the same search on this machine."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.api_core.retry import Retry
from google.cloud.aiplatform_v1 import types as api
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex, Fault
from tests.support.vertex.search_runs import DIGITS, LOG, PARAMETERS, PRECISION, RATE, ROWS, config, opened
from tests.support.vertex.submit_runs import APPROVED
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.run_config import load_run_file
from vlmpipe.config.sections.tune import ParameterSpec, TuneConfig
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.google_cloud import retries
from vlmpipe.google_cloud.client import ENDPOINT_VARIABLE
from vlmpipe.job_spec.file import spec_of
from vlmpipe.pipelines.tune.search import (
    Search,
    open_search,
    points,
    request_of,
    require_tuning,
    run_search,
    value_at,
)
from vlmpipe.platforms.local.jobs import job as local_job
from vlmpipe.trainer import launch
from vlmpipe.trainer.errors import ConfigError, UserError
from vlmpipe.trainer.monitoring.hypertune import METRIC_FILE_VARIABLE, TRIAL_VARIABLE, WATCHED_VARIABLE
from vlmpipe.trainer.monitoring.metrics_writer import MetricsLog
from vlmpipe.trainer.trials import tune as trial_module
from vlmpipe.trainer.trials.tune import open_trial, parse_values

RANK, RANKS = "model.lora.rank", {"discrete_value_spec": {"values": [4, 8]}}


@pytest.fixture
def search(tmp_path: Path) -> Search:
    """A search from a run that has trained."""
    return opened(config(algorithm="RANDOM_SEARCH"), tmp_path)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A root that Vertex AI can write to."""
    with FakeGcs(buckets=["team"]) as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
        yield "gs://team/vlmpipe"


@pytest.fixture
def sent(bucket: str) -> Search:
    """One for Vertex AI."""
    return opened(config(algorithm="RANDOM_SEARCH"), bucket)


# ---- the request


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    monkeypatch.setattr(retries, "RETRY", Retry(initial=0.01, maximum=0.05, timeout=5.0))
    with FakeVertex() as running:
        monkeypatch.setenv(ENDPOINT_VARIABLE, running.endpoint)
        yield running


def test_the_request_has_ranges_metric_and_trials_in_the_apis_terms(server: FakeVertex, sent: Search) -> None:
    request_of(sent).send(APPROVED)
    (job,) = server.tuning_jobs.jobs
    study = json_format.MessageToDict(api.StudySpec.pb(job.study_spec))
    assert study == {
        "metrics": [{"metricId": "exact_match", "goal": "MAXIMIZE"}],
        "algorithm": "RANDOM_SEARCH",
        "parameters": [
            {
                "parameterId": RATE,
                "doubleValueSpec": {"minValue": 1e-4, "maxValue": 1e-2},
                "scaleType": "UNIT_LOG_SCALE",
            },
            {"parameterId": ROWS, "discreteValueSpec": {"values": [1.0, 2.0]}},
            {"parameterId": PRECISION, "categoricalValueSpec": {"values": ["fp32", "bf16"]}},
        ],
    }
    assert (job.max_trial_count, job.parallel_trial_count, job.display_name) == (6, 2, "digits-tune-1")
    container = job.trial_job_spec.worker_pool_specs[0].container_spec
    assert list(container.command) == ["python", "-m", "vlmpipe.trainer.trials.tune"]
    assert list(container.args)[:4] == ["--config", f"{sent.uri}/run.json", "--metric", "exact_match"]
    assert job.trial_job_spec.base_output_directory.output_uri_prefix == sent.uri
    found = spec_of(json_format.MessageToDict(api.HyperparameterTuningJob.pb(job))).check(load_catalog())
    assert not [one for one in found if one.severity == "error"]


@pytest.mark.parametrize(
    ("stopping", "field"), [("median", "medianAutomatedStoppingSpec"), ("decay_curve", "decayCurveStoppingSpec")]
)
def test_trials_are_stopped_early_by_training_metrics(
    server: FakeVertex, bucket: str, stopping: str, field: str
) -> None:
    wanted = config(metric="validation_loss", goal="MINIMIZE", stopping=stopping)
    train = wanted.train.model_copy(update={"validate_every_steps": 0})
    with pytest.raises(ConfigError, match="validate_every_steps is 0"):
        opened(wanted.model_copy(update={"train": train}), bucket)
    train = wanted.train.model_copy(update={"validate_every_steps": 5})
    request_of(opened(wanted.model_copy(update={"train": train}), bucket)).send(APPROVED)
    (job,) = server.tuning_jobs.jobs
    study = json_format.MessageToDict(api.StudySpec.pb(job.study_spec))
    assert study[field] == {} and study["metrics"] == [{"metricId": "validation_loss", "goal": "MINIMIZE"}]


@pytest.mark.parametrize(("action", "jobs"), [("drop_after", 1), ("drop_before", 0)])
def test_a_lost_answer_makes_no_second_search(server: FakeVertex, sent: Search, action: Any, jobs: int) -> None:
    server.faults.append(Fault(action))
    if jobs:
        assert request_of(sent).send(APPROVED).endswith("/5001")
    else:
        with pytest.raises(UserError, match="does not answer"):
            request_of(sent).send(APPROVED)
    assert len(server.tuning_jobs.jobs) == jobs


def test_the_server_refuses_a_search_that_the_api_would(server: FakeVertex, sent: Search) -> None:
    good: dict[str, Any] = request_of(sent).as_dict()
    study = good["studySpec"]
    rate, rows = study["parameters"][:2]
    bad: list[dict[str, Any]] = [
        {**good, "maxTrials": 3},
        {**good, "state": "JOB_STATE_RUNNING"},
        {**good, "displayName": ""},
        {**good, "parallelTrialCount": 7},
        {**good, "studySpec": {**study, "algorithm": "GRID_SEARCH"}},
        {**good, "studySpec": {**study, "metrics": []}},
        {**good, "studySpec": {**study, "parameters": [rows, rows]}},
        {**good, "studySpec": {**study, "parameters": [{"parameterId": "a"}]}},
        {**good, "studySpec": {**study, "parameters": [{**rate, "doubleValueSpec": {"minValue": -1, "maxValue": 1}}]}},
    ]
    assert [_post(server, body) for body in [*bad, good]] == [*[400] * len(bad), 200]


def _post(server: FakeVertex, content: object) -> int:
    connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=10)
    path = "/v1/projects/test-project/locations/us-central1/hyperparameterTuningJobs"
    try:
        connection.request("POST", path, json.dumps(content))
        return connection.getresponse().status
    finally:
        connection.close()


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "two kinds": ({"parameters": {RATE: {**LOG, "discrete_value_spec": {"values": [1]}}}}, "give one of"),
    "no kind": ({"parameters": {RATE: {}}}, "give one of"),
    "an empty range": ({"parameters": {RATE: {"double_value_spec": {"min_value": 1, "max_value": 1}}}}, "not below"),
    "log of 0": (
        {"parameters": {RATE: {**LOG, "double_value_spec": {"min_value": 0, "max_value": 1}}}}, "a range above 0",
    ),
    "falling values": ({"parameters": {ROWS: {"discrete_value_spec": {"values": [2, 1]}}}}, "rising order"),
    "a grid of real numbers": ({"algorithm": "GRID_SEARCH"}, "takes no double_value_spec"),
    "data": (
        {"parameters": {"data.sequence_length": {"discrete_value_spec": {"values": [64]}}}}, "only fields of train"
    ),
    "one thing in two forms": (
        {
            "parameters": {
                "train.warmup_steps": {"discrete_value_spec": {"values": [1, 2]}},
                "train.warmup_fraction": {"discrete_value_spec": {"values": [0.1, 0.2]}},
            }
        },
        "train.warmup_steps and train.warmup_fraction say the same",
    ),
    "stopping by what is measured once": ({"stopping": "median"}, "set metric to validation_loss"),
    "the largest loss": ({"metric": "validation_loss"}, "set goal to MINIMIZE"),
    "more at once than in all": ({"parallel_trial_count": 7}, "more than max_trial_count"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_an_invalid_section_is_refused(name: str) -> None:
    tuning, said = REFUSALS[name]
    with pytest.raises(RunFileError, match=said):
        config(**tuning)


def test_every_end_must_make_a_run_file_and_the_run_must_have_trained(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"tune.parameters train.micro_batch_size=3"):
        require_tuning(config(parameters={ROWS: {"integer_value_spec": {"min_value": 1, "max_value": 3}}}))
    with pytest.raises(RunFileError, match=r"train.optimizer.rate"):
        require_tuning(config(parameters={"train.optimizer.rate": LOG}))
    with pytest.raises(ConfigError, match=r"the run file has no model\.lora"):
        require_tuning(config(parameters={RANK: RANKS}))
    with pytest.raises(ConfigError, match="no section tune"):
        require_tuning(load_run_file(DIGITS))
    with pytest.raises(ConfigError, match="has not trained"):
        open_search(config(), "base", "s", str(tmp_path))
    found = opened(config(), tmp_path)
    other = found.config.model_copy(update={"data": found.config.data.model_copy(update={"sequence_length": 128})})
    with pytest.raises(ConfigError, match="section data differs from that of run base"):
        open_search(other, "base", "s", str(tmp_path))


# ---- a trial


def test_a_trial_has_adapters_of_its_own_width_on_the_data_of_all(tmp_path: Path) -> None:
    """Values of a discrete parameter arrive as real numbers: 8.0."""
    found = opened(config("model.lora={rank: 16}", parameters={RANK: RANKS, RATE: LOG}), tmp_path)
    given = parse_values([f"--{RANK}=8.0", f"--{RATE}=0.001"])
    trial, before = open_trial(f"{found.uri}/run.json", given, "1"), open_trial(f"{found.uri}/run.json", {}, "2")
    assert trial.model.lora and trial.model.lora.rank == 8 and before.model.lora and before.model.lora.rank == 16
    assert trial.run.prepared_root == before.run.prepared_root


def test_trials_never_share_a_folder_and_one_that_starts_again_keeps_its_own(search: Search) -> None:
    uri = f"{search.uri}/run.json"
    first, second, again = (
        open_trial(uri, {RATE: rate}, trial) for rate, trial in ((1e-3, "1"), (2e-3, "2"), (1e-3, "1"))
    )
    assert (first.run.run_uri, second.run.run_uri) == (f"{search.uri}/trial-1", f"{search.uri}/trial-2")
    assert first == again and first.train.optimizer.learning_rate == 1e-3
    assert first.run.prepared_root == second.run.prepared_root
    assert json.loads((Path(second.run.run_uri) / "prepared.json").read_text())["features"] == "reuse"
    for trial in ("", "../1"):
        with pytest.raises(ConfigError, match="the trial's id"):
            open_trial(uri, {}, trial)
    with pytest.raises(ConfigError, match=r"there is no field train.rate"):
        open_trial(uri, {"train.rate": 1}, "3")
    warming = open_trial(uri, {"train.warmup_steps": 4}, "4").train
    assert (warming.warmup_fraction, warming.warmup_steps) == (None, 4)
    assert parse_values(["--a.b=1e-3", "--c=2.0", "--d=fp32"]) == {"a.b": 1e-3, "c": 2.0, "d": "fp32"}
    with pytest.raises(ConfigError, match="--name=value"):
        parse_values(["--a", "1"])


def test_a_trial_trains_exports_evaluates_and_reports_as_the_service_reads(
    search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def launched(arguments: list[str]) -> int:
        module, uri = arguments[3], Path(arguments[-1]).parent
        ran.append(module)
        train, evaluate = ("summary.json", {"steps": 7}), ("evaluate.json", {"exact_match": 0.5})
        results: dict[str, tuple[str, Any]] = {
            "vlmpipe.trainer.train": train,
            "vlmpipe.trainer.evaluation.evaluate": evaluate,
        }
        name, content = results[module]
        (uri / name).write_text(json.dumps(content))
        return 0

    monkeypatch.setattr(launch, "main", launched)
    monkeypatch.setattr("vlmpipe.trainer.checkpoint.sync.sync_run", lambda job: ran.append("sync"))
    monkeypatch.setenv(TRIAL_VARIABLE, "4")
    monkeypatch.setenv(METRIC_FILE_VARIABLE, str(tmp_path / "hypertune/output.metrics"))
    arguments = ["--config", f"{search.uri}/run.json", "--metric", "exact_match", "--nproc-per-node", "1"]
    assert trial_module.main([*arguments, f"--{RATE}=0.003"]) == 0
    assert ran == ["vlmpipe.trainer.train", "sync", "vlmpipe.trainer.evaluation.evaluate"]
    (line,) = (tmp_path / "hypertune/output.metrics").read_text().splitlines()
    found = json.loads(line)
    assert found.pop("timestamp") > 0
    assert found == {"trial": "4", "exact_match": "0.5", "global_step": "7"}
    with pytest.raises(ConfigError, match="no number bleu"):
        trial_module.report(open_trial(f"{search.uri}/run.json", {}, "4"), "bleu")


def test_a_trial_that_is_watched_reports_after_each_validation_and_evaluates_nothing(
    search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def launched(arguments: list[str]) -> int:
        ran.append(arguments[3])
        log = MetricsLog(str(Path(arguments[-1]).parent), resumed_from_step=0)
        for step, values in ((5, {"validation_loss": 2.0}), (6, {"loss": 1.9}), (10, {"validation_loss": 1.5})):
            log.write(step, values)
        log.close()
        return 0

    monkeypatch.setattr(launch, "main", launched)
    monkeypatch.setenv(TRIAL_VARIABLE, "4")
    monkeypatch.setenv(METRIC_FILE_VARIABLE, str(tmp_path / "output.metrics"))
    monkeypatch.setenv(WATCHED_VARIABLE, "")
    arguments = ["--config", f"{search.uri}/run.json", "--metric", "validation_loss", "--nproc-per-node", "1"]
    assert trial_module.main(arguments) == 0
    assert ran == ["vlmpipe.trainer.train"]
    lines = [json.loads(line) for line in (tmp_path / "output.metrics").read_text().splitlines()]
    assert [(one["trial"], one["validation_loss"], one["global_step"]) for one in lines] == [
        ("4", "2.0", "5"), ("4", "1.5", "10"),
    ]  # fmt: skip


# ---- on this machine


@given(
    share=st.floats(0, 1, exclude_max=True),
    ends=st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)).filter(lambda pair: pair[0] < pair[1]),
    kind=st.sampled_from(["double_value_spec", "integer_value_spec"]),
    scale=st.sampled_from(["UNIT_LINEAR_SCALE", "UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE"]),
)
def test_a_value_lies_in_its_range_and_grows_with_its_share(share: float, ends: Any, kind: str, scale: str) -> None:
    if kind == "integer_value_spec" and ends[1] - ends[0] > 1000:
        ends = (ends[0], ends[0] + 1000)
    spec = ParameterSpec.model_validate({kind: {"min_value": ends[0], "max_value": ends[1]}, "scale_type": scale})
    value = value_at(spec, share)
    assert ends[0] <= value <= ends[1]  # type: ignore[operator]
    assert value_at(spec, 0) == pytest.approx(ends[0], rel=1e-9)
    assert value_at(spec, share / 2) <= value + 1e-9 * ends[1]  # type: ignore[operator]
    assert isinstance(value, int) == (kind == "integer_value_spec")


def test_a_grid_goes_through_every_point_and_chance_is_repeatable() -> None:
    parameters = {
        "train.seed": {"integer_value_spec": {"min_value": 1, "max_value": 3}},
        PRECISION: PARAMETERS[PRECISION],
    }
    grid = TuneConfig.model_validate({"algorithm": "GRID_SEARCH", "parameters": parameters})
    found = [tuple(point.values()) for point in points(grid)]
    assert found == [(seed, precision) for seed in (1, 2, 3) for precision in ("fp32", "bf16")]
    by_chance = TuneConfig.model_validate({"algorithm": "RANDOM_SEARCH", "parameters": PARAMETERS, "seed": 3})
    assert list(points(by_chance)) == list(points(by_chance))
    assert list(points(by_chance)) != list(points(by_chance.model_copy(update={"seed": 4})))
    with pytest.raises(ConfigError, match="Vertex AI's own search"):
        points(TuneConfig.model_validate({"parameters": PARAMETERS}))


def test_the_search_here_writes_a_table_best_first_and_a_failed_trial_is_a_line(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []

    def run(name: str, spec: dict[str, Any], **_settings: Any) -> None:
        container = spec["worker_pool_specs"][0]["container_spec"]
        env = {one["name"]: one["value"] for one in container["env"]}
        number = int(env[TRIAL_VARIABLE])
        folders.append(spec["base_output_directory"]["output_uri_prefix"])
        if number == 2:
            raise UserError("training is not finite")
        assert f"--{RATE}=" in " ".join(container["args"])
        Path(env[METRIC_FILE_VARIABLE]).parent.mkdir(parents=True)
        Path(env[METRIC_FILE_VARIABLE]).write_text(
            json.dumps({"trial": number, "exact_match": str(number / 10)}), encoding="utf-8"
        )

    monkeypatch.setattr(local_job, "run_job", run)
    table = run_search(search)
    assert [(one.trial, one.metric) for one in table] == [(6, 0.6), (5, 0.5), (4, 0.4), (3, 0.3), (1, 0.1), (2, None)]
    assert table[-1].error == "training is not finite"
    assert len(set(folders)) == 6
    written = json.loads((Path(search.uri) / "trials.json").read_text())
    assert [one["trial"] for one in written] == [1, 2, 3, 4, 5, 6]
