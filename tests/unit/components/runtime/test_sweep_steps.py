"""The trainings of a sweep: their run files, what they share, and the jobs that they are dealt out to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from vlmpipe.components.runtime.parameters import compiled_settings
from vlmpipe.components.runtime.resolve import resolve
from vlmpipe.components.runtime.sweep_steps import (
    encode_features,
    open_jobs,
    preparations,
    prepare_variant_data,
    train_variants,
)
from vlmpipe.config.run_config import load_run_file
from vlmpipe.platforms.local.jobs import job as local_job
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.records.sweep import FeaturesError, Outcome, Sweep
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record, write_record
from vlmpipe.trainer.trials.files import is_done, settings_sha256

DIGITS = ROOT / "configs/digits.yaml"


def opened(root: Path, sweep: dict[str, Any], *overrides: str) -> tuple[str, Sweep]:
    """Resolve a run of this sweep. Returns its folder and its sweep.json."""
    settings = ["cluster.replica_count=1", f"output.root_uri={root}", f"sweep={json.dumps(sweep)}", *overrides]
    config = load_run_file(DIGITS, settings)
    run_file = json.dumps(config.to_dict())
    found = resolve(run_file, compiled_settings(config, "local", str(root)), job_name="sweep-1")
    return found.run_uri, Sweep.read(open_storage(found.run_uri))


def test_every_start_has_a_run_file_of_its_own(tmp_path: Path) -> None:
    _, sweep = opened(tmp_path, {"grid": {"train.global_batch_size": [8, 16]}, "starts": 2}, "train.seed=5")
    runs = [read_record(open_storage(training.run_uri), "run.json") for training in sweep.trainings]
    assert [(run["train"]["global_batch_size"], run["train"]["seed"], run["model"]["seed"]) for run in runs] == [
        (8, 5, 0), (8, 6, 1), (16, 5, 0), (16, 6, 1)
    ]  # fmt: skip
    assert [run["run"]["run_id"] for run in runs][-1] == "sweep-1/variants/global_batch_size-16/1"
    assert all("sweep" not in run for run in runs)
    assert sweep.baseline == "global_batch_size-8"


def test_data_is_prepared_once_and_features_once_for_each_tower(tmp_path: Path) -> None:
    grid = {"train.global_batch_size": [8, 16], "data.sequence_length": [256, 512]}
    uri, sweep = opened(tmp_path, {"grid": grid, "starts": 2})
    of_length = {256: set[str](), 512: set[str]()}
    towers: dict[tuple[int, int], set[str]] = {}
    for one in sweep.trainings:
        length = read_record(open_storage(one.run_uri), "run.json")["data"]["sequence_length"]
        of_length[length].add(one.data_from)
        towers.setdefault((length, one.start), set()).add(one.features_from)
    # The tower is drawn from model.seed, so that each start has features of its own.
    assert {len(found) for found in towers.values()} == {1}
    assert len(set.union(*towers.values())) == 4
    assert preparations(uri) == list(dict.fromkeys(one.data_from for one in sweep.trainings))
    # Packed or not, the same samples are prepared: the length of sequences is no part of them unless it cuts them.
    assert len(preparations(uri)) <= 2


def test_a_learning_curve_has_first_weights_and_features_in_common(tmp_path: Path) -> None:
    uri, sweep = opened(tmp_path, {"grid": {"data.train_share": [0.2, 0.5, 1.0]}, "starts": 2}, "model.seed=3")
    runs = [read_record(open_storage(training.run_uri), "run.json") for training in sweep.trainings]
    assert {run["model"]["seed"] for run in runs} == {3} and [run["train"]["seed"] for run in runs] == [0, 1] * 3
    assert len({training.features_from for training in sweep.trainings}) == len(preparations(uri)) == 1


def test_jobs_are_dealt_evenly_and_hold_one_kind_of_machine(tmp_path: Path) -> None:
    variants = {"a": {}, "b": {"train.seed": 9}, "big": {"cluster.machine_type": "n1-standard-16"}}
    _, sweep = opened(tmp_path, {"variants": variants, "starts": 3, "trainings_per_job": 4})
    assert sorted(number for job in sweep.jobs for number in job) == list(range(9))
    assert sorted(map(len, sweep.jobs)) == [3, 3, 3]
    for job in sweep.jobs:
        names = {sweep.trainings[index].variant for index in job}
        assert names == {"big"} or "big" not in names


def test_a_variant_that_cannot_run_is_named_before_anything_starts(tmp_path: Path) -> None:
    variants = {"a": {}, "b": {"model.tower": {"weights": str(tmp_path / "none")}}}
    with pytest.raises(UserError, match="variant b: "):
        opened(tmp_path, {"variants": variants})


def test_jobs_that_are_done_are_not_listed_again(tmp_path: Path) -> None:
    uri, sweep = opened(tmp_path, {"grid": {"train.seed": [1, 2]}, "starts": 1})
    for one in sweep.trainings:
        open_storage(one.run_uri).write("prepared.json", b"{}")
    assert open_jobs(uri) == [f"0 {uri}", f"1 {uri}"]
    Outcome(state="done").write(open_storage(sweep.trainings[0].run_uri))
    Outcome(state="failed").write(open_storage(sweep.trainings[1].run_uri))
    assert open_jobs(uri) == [f"1 {uri}"]


def test_data_that_no_variant_has_ends_the_sweep_with_its_error(tmp_path: Path) -> None:
    wrong = tmp_path / "data.json"
    turns = [{"from": "human", "value": "<image>\\nWhat is this?"}, {"from": "gpt", "value": "A cat."}]
    wrong.write_text(json.dumps([{"id": str(one), "image": "none.png", "conversations": turns} for one in range(9)]))
    uri, _ = opened(tmp_path, {"grid": {"train.seed": [1, 2]}, "starts": 1}, f"data.source={wrong}")
    (only,) = preparations(uri)
    prepare_variant_data(only)  # prints the error, and goes on
    assert encode_features(only, "local").startswith("no data")
    with pytest.raises(UserError, match="no variant's data could be prepared") as caught:
        open_jobs(uri)
    assert caught.value.code == ExitCode.DATA


@pytest.mark.parametrize("target", ["local", "vertex", "kubeflow"])
def test_a_job_that_fails_is_an_answer_and_a_stop_is_none(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlmpipe.platforms.kubeflow.jobs import job as kubeflow_job
    from vlmpipe.platforms.vertex.jobs import capacity_fallback

    uri, _ = opened(tmp_path, {"grid": {"train.seed": [1, 2]}, "starts": 1})
    sent: list[Any] = []
    error = ConfigError("no such machine")

    def job(*given: Any, **settings: Any) -> str:
        sent.append((given, settings))
        raise error

    monkeypatch.setattr(local_job, "run_job", job)
    monkeypatch.setattr(capacity_fallback, "run_with_fallback", job)
    monkeypatch.setattr(kubeflow_job, "run_on_kubeflow", job)
    assert train_variants(f"1 {uri}", target) == "train-variants-1: no such machine"
    given, settings = sent[0]
    spec = given[0].spec() if target == "vertex" else given[1]
    labels = given[0].labels if target == "vertex" else settings["labels"]
    assert labels["vlmpipe-step"] == "train-variants-1"
    (pool,) = spec["worker_pool_specs"]
    assert pool["container_spec"]["args"][:4] == ["--config", f"{uri}/sweep.json", "--job", "1"]
    error = UserError("stopped", code=ExitCode.PREEMPTED)  # type: ignore[assignment]
    with pytest.raises(UserError, match="stopped"):
        train_variants(f"1 {uri}", target)


@pytest.mark.parametrize("chosen", ["", "3"])
def test_trainings_side_by_side_share_the_cores_unless_the_caller_says_how_many(
    chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, _ = opened(tmp_path, {"grid": {"train.seed": [1, 2]}, "starts": 1, "parallelism": 2})
    specs: list[Any] = []
    monkeypatch.setattr(local_job, "run_job", lambda _, spec, **__: specs.append(spec))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    train_variants(f"0 {uri}", "local")
    (pool,) = specs[0]["worker_pool_specs"]
    threads = [one["value"] for one in pool["container_spec"].get("env", []) if one["name"] == "OMP_NUM_THREADS"]
    assert threads == ([] if chosen else ["4"]), "the job inherits what the caller chose"


def test_a_sweep_that_goes_on_with_other_settings_is_refused_unless_all_is_trained_anew(tmp_path: Path) -> None:
    def start(rate: float, *overrides: str) -> Sweep:
        variants = {"slow": {"train.optimizer.learning_rate": rate}, "usual": {}}
        return opened(tmp_path, {"variants": variants, "starts": 1}, *overrides)[1]

    store = open_storage(start(1e-4).trainings[0].run_uri)
    settings = settings_sha256(read_record(store, "run.json"))
    Outcome(state="done", settings=settings, submission="another").write(store)
    start(1e-4, "notify.webhook=https://example.com/hook")  # decides nothing
    record = read_record(store, "run.json")
    with pytest.raises(ConfigError, match="was trained with other settings of variant slow") as refused:
        start(1e-2, "evaluate.max_new_tokens=9")
    changed = "train.optimizer.learning_rate changed from 0.0001 to 0.01"
    assert "evaluate.max_new_tokens changed from" in refused.value.found and changed in refused.value.found
    assert read_record(store, "run.json") == record, "a start that is refused changes nothing"

    del record["evaluate"]["batch_questions"]  # a field that this version has added
    write_record(store, "run.json", record)
    Outcome(state="done", settings=settings_sha256(record), submission="another").write(store)
    start(1e-4)
    start(1e-4)  # and again, after a stop
    with pytest.raises(ConfigError, match="learning_rate changed from"):
        start(1e-2)
    record["train"]["nvme_path"] = ""  # it did nothing
    write_record(store, "run.json", record)
    Outcome(state="done", settings=settings_sha256(record), submission="another").write(store)
    start(1e-4)
    record["train"]["gone"] = 1  # and one that it has removed
    write_record(store, "run.json", record)
    Outcome(state="done", settings=settings_sha256(record), submission="another").write(store)
    with pytest.raises(ConfigError, match=r"run.json is of another version of vlmpipe"):
        start(1e-4)
    uri = open_storage(start(1e-2, "train.resume=never").trainings[0].run_uri)
    assert not is_done(uri)
    Outcome(state="done", submission="sweep-1").write(uri)
    assert is_done(uri), "a job that is restarted repeats nothing"


def test_a_value_that_every_variant_replaces_is_refused_and_no_other(tmp_path: Path) -> None:
    grid = {"grid": {"train.epochs": [10, 20]}, "starts": 1}
    with pytest.raises(ConfigError, match=r"train.epochs: every variant of the sweep has its own"):
        opened(tmp_path, grid, "train.epochs=1")
    some = {"variants": {"a": {"train.epochs": 10}, "b": {}}, "starts": 1}
    opened(tmp_path, some, "train.epochs=1")


def test_features_that_could_not_be_encoded_are_known_to_the_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(*_given: Any, **_settings: Any) -> str:
        raise UserError("no machines were found")

    uri, sweep = opened(tmp_path, {"grid": {"train.seed": [1, 2]}, "starts": 1}, "data.max_samples=40")
    (only,) = preparations(uri)
    prepare_variant_data(only)
    monkeypatch.setattr(local_job, "run_job", job)
    assert encode_features(only, "local").endswith("no machines were found")
    store = open_storage(sweep.trainings[1].features_from)
    assert FeaturesError.read(store).error == "no machines were found"
    monkeypatch.setattr(local_job, "run_job", lambda *_given, **_settings: "")
    assert encode_features(only, "local") == "cache-features: done" and store.stat(FeaturesError.FILE) is None
