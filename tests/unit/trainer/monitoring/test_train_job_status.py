"""Progress for Kubeflow Trainer's controller: its own API's form, its token, and no harm to training."""

from __future__ import annotations

import json
import ssl
import time
from pathlib import Path

import pytest
from kubeflow_trainer_api.models.trainer_v1alpha1_trainer_status import TrainerV1alpha1TrainerStatus

from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.external.progress_endpoint import ProgressEndpoint
from vlmpipe.trainer.monitoring.trackers import TensorBoardLog, open_trackers
from vlmpipe.trainer.monitoring.train_job_status import (
    CA_CERT,
    ENDED_EARLY,
    INTERVAL_S,
    TOKEN,
    URL,
    TrainJobStatus,
    open_train_job_status,
    status_of,
)

VALUES = {"loss": 0.5, "step_s": 2.0, "tokens_per_s": float("nan"), "reduction_server": "active"}


def opened(monkeypatch: pytest.MonkeyPatch, total_steps: int, **variables: str) -> TrainJobStatus | None:
    for name in (URL, TOKEN, CA_CERT):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return open_train_job_status(total_steps)


def test_a_status_has_the_form_of_the_api() -> None:
    status = status_of(30, VALUES, 40)
    read = TrainerV1alpha1TrainerStatus.from_json(json.dumps(status))
    assert read and read.metrics
    assert (read.progress_percentage, read.estimated_remaining_seconds) == (75, 20)
    metrics = {one.name: one.value for one in read.metrics}
    assert metrics == {"current_step": "30", "total_steps": "40", "loss": "0.5", "step_s": "2.0"}
    assert set(status) == {"lastUpdatedTime", "progressPercentage", "estimatedRemainingSeconds", "metrics"}
    assert status_of(40, {}, 40)["progressPercentage"] == 100


def test_a_validation_joins_its_step_and_leaves_the_time_that_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = opened(monkeypatch, 40, **{URL: "http://nowhere", TOKEN: str(tmp_path / "none")})
    assert tracker
    posted = list[dict[str, object]]()
    monkeypatch.setattr(tracker, "_post", lambda body: posted.append(json.loads(body)["trainerStatus"]))
    tracker.write(30, VALUES)
    tracker.write(30, {"validation_loss": 3.0})
    tracker.close()
    assert [one["estimatedRemainingSeconds"] for one in posted] == [20, 20]
    assert {"name": "validation_loss", "value": "3.0"} in posted[1]["metrics"]
    assert {"name": "loss", "value": "0.5"} in posted[1]["metrics"]
    assert "estimatedRemainingSeconds" not in status_of(30, {"validation_loss": 3.0}, 40), "it is not known"


def test_a_training_that_ended_early_is_complete() -> None:
    status = TrainerV1alpha1TrainerStatus.from_json(json.dumps(status_of(18, VALUES | {ENDED_EARLY: 1.0}, 40)))
    assert status and status.metrics
    assert (status.progress_percentage, status.estimated_remaining_seconds) == (100, 0)
    metrics = {one.name: one.value for one in status.metrics}
    assert (metrics["current_step"], metrics["total_steps"], metrics["ended_early"]) == ("18", "40", "1.0")


def test_the_first_step_and_the_last_are_posted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressEndpoint(tmp_path) as endpoint:
        tracker = opened(monkeypatch, 40, **endpoint.variables)
        assert tracker
        tracker.write(1, VALUES)
        until = time.monotonic() + 10
        while endpoint.posted.step < 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert endpoint.posted.step == 1
        started = time.monotonic()
        for step in range(2, 41):
            tracker.write(step, {"loss": 1 / step})
        assert time.monotonic() - started < INTERVAL_S and endpoint.posted.step == 1, "posts are apart"
        tracker.close()
        assert (endpoint.posted.step, endpoint.posted.total_steps, endpoint.posted.loss) == (40, 40, 1 / 40)
    assert capsys.readouterr().err == ""


def test_a_run_that_a_trainjob_trains_has_this_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_run_file(ROOT / "configs/digits.yaml").to_run_json(RunPaths(run_id="r", root_uri=str(tmp_path)))
    job = JobConfig.model_validate(settings)
    with ProgressEndpoint(tmp_path) as endpoint:
        assert opened(monkeypatch, 40, **endpoint.variables)
        trackers = open_trackers(job, 40)
        assert [type(one) for one in trackers] == [TensorBoardLog, TrainJobStatus]
        for one in trackers:
            one.write(7, {"loss": 0.5})
            one.close()
        assert (endpoint.posted.step, endpoint.posted.total_steps) == (7, 40)


def test_a_refused_post_is_one_warning_without_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressEndpoint(tmp_path) as endpoint:
        (wrong := tmp_path / "token").write_text("secret-of-another")
        tracker = opened(monkeypatch, 40, **{**endpoint.variables, TOKEN: str(wrong)})
        assert tracker
        tracker.write(1, VALUES)
        tracker.write(2, VALUES)
        tracker.close()
        assert endpoint.posted.step == 0
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "HTTPError" in said and "secret" not in said


def test_without_a_controller_nothing_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert opened(monkeypatch, 40) is None
    assert capsys.readouterr().err == ""
    variables = {URL: "https://controller/", TOKEN: str(tmp_path / "token"), CA_CERT: str(tmp_path / "none.pem")}
    assert opened(monkeypatch, 40, **variables) is None
    assert "no status of the TrainJob: FileNotFoundError" in capsys.readouterr().err
    (tmp_path / "none.pem").write_text("no certificate")
    with pytest.raises(ssl.SSLError):
        ssl.create_default_context(cafile=str(tmp_path / "none.pem"))
    assert opened(monkeypatch, 40, **variables) is None
