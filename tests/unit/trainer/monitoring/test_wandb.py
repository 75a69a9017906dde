"""Metrics on Weights & Biases, by its own library without a network: offline, and where nobody answers."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.receiver import Receiver
from tests.support.trainer.runs import TINY, merged
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.monitoring.metrics_writer import MetricsLog
from vlmpipe.trainer.monitoring.wandb import KEY_VARIABLE, WandbLog, open_wandb, wandb_folder
from vlmpipe.trainer.records.metrics import FILE

FILE_HEADER, BLOCK_BYTES = b":W&B\xe1\xbe\x00", 32768
RUN = {"run_id": "tune-1/trial-2", "root_uri": "/nowhere"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing of W&B goes anywhere else, and no login of a person is used."""
    for name in (KEY_VARIABLE, "WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    yield tmp_path
    import wandb

    wandb.teardown()  # where a test did not close


def job(**settings: str) -> JobConfig:
    changes = {f"train.wandb.{name}": value for name, value in settings.items()}
    return JobConfig.model_validate(merged(TINY, changes) | {"run": RUN})


def records(folder: Path) -> list[Any]:
    """What W&B's own file of an offline run holds."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, place, found = file.read_bytes(), len(FILE_HEADER), []
    assert data.startswith(FILE_HEADER) and len(data) < BLOCK_BYTES
    while place < len(data):  # LevelDB's log format: checksum, length, whether the record is whole, and the record
        _, length, kind = struct.unpack_from("<IHB", data, place)
        assert kind == 1
        place += 7 + length
        found.append(wandb_internal_pb2.Record.FromString(data[place - length : place]))
    return found


def test_every_line_is_in_the_run_that_has_the_runs_id(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb_log = open_wandb(job(project="digits", entity="team"))
    assert wandb_log
    log = MetricsLog(str(place / "run"), resumed_from_step=0, trackers=[wandb_log])
    for step in (10, 20):
        log.write(step, {"loss": 1 / step, "fill": 0.5})
    log.close()
    found = records(place)
    (run,) = {(one.run.project, one.run.entity, one.run.run_id) for one in found if one.HasField("run")}
    assert run == ("digits", "team", "tune-1-trial-2")
    lines = [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in one.history.item}
             for one in found if one.HasField("history")]  # fmt: skip
    sent = [{name: line[name] for name in ("step", "train/loss", "train/fill")} for line in lines]
    assert sent == [{"step": step, "train/loss": 1 / step, "train/fill": 0.5} for step in (10, 20)]
    assert len((place / "run" / FILE).read_text().splitlines()) == 2


def test_wandb_is_not_imported_unless_configured(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", None)
    assert open_wandb(job()) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "No API key configured"),
        ({"api_key_secret": "projects/p/secrets/forbidden"}, "no permission to read projects/p/secrets/forbidden"),
        ({"api_key_secret": "projects/p/secrets/absent"}, "Secret Manager answers 404"),
    ],
    ids=["no login", "forbidden", "absent"],
)
def test_refused_access_does_not_stop_training(
    settings: dict[str, str],
    words: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Receiver() as receiver:
        monkeypatch.setenv("WANDB_BASE_URL", receiver.endpoint)
        monkeypatch.setattr("vlmpipe.trainer.secret_manager.SECRET_MANAGER", receiver.endpoint)
        assert open_wandb(job(project="digits", **settings)) is None
    said = capfd.readouterr().err
    assert "train: warning: Weights & Biases: no metrics: " in said and words in said


def test_failing_service_is_reported_once_and_training_continues(capfd: pytest.CaptureFixture[str]) -> None:
    class Broken:
        calls = 0

        def log(self, line: dict[str, float]) -> None:
            self.calls += 1
            raise BrokenPipeError("of a socket to key-1234")

    run = Broken()
    log = WandbLog(run)
    for step in (10, 20):
        log.write(step, {"loss": 1.0})
    log.close()
    assert run.calls == 1
    assert capfd.readouterr().err == "train: warning: Weights & Biases: no metrics from step 10 on: BrokenPipeError\n"


def test_unknown_error_is_named_without_its_text(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(**settings: Any) -> None:
        raise RuntimeError("key-1234 is wrong")

    monkeypatch.setattr("wandb.init", broken)
    assert open_wandb(job(project="digits")) is None
    assert capfd.readouterr().err == "train: warning: Weights & Biases: no metrics: RuntimeError\n"


@pytest.mark.parametrize(("run_uri", "with_it"), [("/runs/one", True), ("gs://bucket/runs/one", False)])
def test_wandb_files_are_in_a_local_runs_folder(
    run_uri: str, with_it: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    uri = run_uri if "://" in run_uri else f"{tmp_path}{run_uri}"
    folder = wandb_folder(uri)
    assert folder and Path(folder).is_dir() and (folder == uri) is with_it
    monkeypatch.setenv("WANDB_DIR", "/elsewhere")
    assert wandb_folder(uri) is None


def test_the_key_comes_from_secret_manager_and_is_not_printed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    key = "k" * 40
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Receiver() as receiver:
        receiver.secrets = {"projects/p/secrets/wandb/versions/latest": key}
        monkeypatch.setattr("vlmpipe.trainer.secret_manager.SECRET_MANAGER", receiver.endpoint)
        wandb_log = open_wandb(job(project="digits", api_key_secret="projects/p/secrets/wandb"))
    assert wandb_log
    wandb_log.close()
    assert os.environ[KEY_VARIABLE] == key
    said = capfd.readouterr()
    assert key not in said.out + said.err
    assert not any(key.encode() in path.read_bytes() for path in place.rglob("*") if path.is_file())


def test_missing_package_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"vlmpipe\[wandb\]") as caught:
        open_wandb(job(project="digits"))
    assert caught.value.code == ExitCode.UNAVAILABLE
