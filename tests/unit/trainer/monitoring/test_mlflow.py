"""MLflow: metrics in a real local store, found again by the next attempt; a store that fails ends no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.monitoring.metrics_writer import MetricsLog
from vlmpipe.trainer.monitoring.mlflow import MlflowLog, open_mlflow


def job(root: Path, **settings: Any) -> JobConfig:
    config = load_run_file(
        ROOT / "configs/digits.yaml", [f"train.mlflow.{name}={value}" for name, value in settings.items()]
    )
    return JobConfig.model_validate(config.to_run_json(RunPaths(run_id="digits-1", root_uri=str(root))))


@pytest.mark.parametrize("store", ["{folder}/store", "sqlite:///{folder}/store.db"])
def test_a_resumed_run_continues_its_curves(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    if store.startswith("sqlite"):
        pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = store.format(folder=tmp_path)
    for steps in ((10, 20), (30,)):
        tracker = open_mlflow(job(tmp_path, tracking_uri=uri, experiment="trials"))
        assert tracker
        log = MetricsLog(str(tmp_path / "run"), resumed_from_step=0, trackers=[tracker])
        for step in steps:
            log.write(step, {"loss": 1 / step, "reduction_server": "active"})
        log.close()
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("trials")
    assert experiment
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "digits-1" and run.info.status == "FINISHED"
    assert run.data.params["train.strategy"] == "ddp" and "model.family" in run.data.params
    curve = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in curve] == [(step, 1 / step) for step in (10, 20, 30)]


def test_without_a_tracking_uri_mlflow_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", None)
    assert open_mlflow(job(tmp_path)) is None


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match="mlflow is not installed") as caught:
        open_mlflow(job(tmp_path, tracking_uri="http://127.0.0.1:9"))
    assert caught.value.code == ExitCode.UNAVAILABLE and "vlmpipe[mlflow]" in caught.value.fix


def test_a_server_that_is_not_there_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert open_mlflow(job(tmp_path, tracking_uri="http://127.0.0.1:9/a-secret-path")) is None
    said = capsys.readouterr().err
    assert said.startswith("train: warning: MLflow: no metrics: ") and "a-secret-path" not in said


def test_a_failing_store_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlflow")

    class Broken:
        def log_batch(self, *_: object) -> None:
            raise BrokenPipeError("of a socket to key-1234")

        set_terminated = log_batch

    log = MlflowLog(Broken(), "r")  # type: ignore[arg-type]
    for step in (10, 20):
        log.write(step, {"loss": 1.0})
    log.close()
    said = capsys.readouterr().err
    assert said.count("train: warning: MLflow") == 1 and said.rstrip().endswith("BrokenPipeError")
