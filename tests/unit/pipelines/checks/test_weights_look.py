"""Where weights are said to be, and that no check asks the hub."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe import api
from vlmpipe.cli import tune
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.pipelines import submit_job
from vlmpipe.pipelines.checks.weights_look import look_at_weights
from vlmpipe.planner import plan
from vlmpipe.planner.plan import Plan
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage import gcs
from vlmpipe.trainer.storage.hub.client import without_hub
from vlmpipe.trainer.storage.model_folders import local_folder
from vlmpipe.trainer.storage.outage import must_answer_soon
from vlmpipe.trainer.storage.s3_api import client as s3_client


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models, in which commands are started."""
    for name in ("tiny-qwen", "models/tiny-qwen"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "state", "said"),
    [
        ("tiny-qwen", "ok", "folder tiny-qwen"),
        ("models/tiny-qwn", "warning", "Did you mean models/tiny-qwen?"),
        ("./tiny-qwn", "failed", "no folder ./tiny-qwn"),
        ("build/recipes/tiny", "failed", "make build/recipes/tiny/config.json makes it"),
        ("Qwen/Qwen2.5-0.5B", "unchecked", "will be fetched"),
        ("gpt2", "unchecked", "will be fetched"),
    ],
)
def test_a_misspelt_folder_is_no_hub_id_without_a_word(models: Path, name: str, state: str, said: str) -> None:
    found = look_at_weights(WeightsConfig(weights=name, revision="", config={}))
    assert (found[0], said in found[1]) == (state, True)


def test_a_misspelt_folder_without_an_owner_is_refused_at_once(models: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean tiny-qwen"):
        local_folder("tiny-qwn")
    assert local_folder("gpt2") is None


def test_checks_and_plans_ask_no_network(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def connect(*arguments: object, **options: object) -> None:
        asked.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.setattr(socket, "create_connection", connect)
    config = load_run_file(
        ROOT / "configs/qwen2-5-vl-7b.yaml",
        ["model.pretrained.weights=somebody/own-model", "data.source=builtin:digits", "output.root_uri=runs"],
    )
    found = api.check(config)
    assert asked == []
    assert any("will be fetched" in one.text for one in found)


@pytest.mark.parametrize("listens", [True, False], ids=["no answer", "refused"])
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_store_that_does_not_answer_is_asked_once_by_check_and_plan(
    scheme: str, listens: bool, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run waits for minutes; who sits before a terminal does not."""
    for room in (gcs, s3_client):
        monkeypatch.setattr(room, "SOON_S", 0.2)
    monkeypatch.setattr(gcs, "SOON", gcs.SOON.with_timeout(0.2))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections by its queue, and never answers
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        if not listens:
            server.close()
        weights = f"model.pretrained.weights={scheme}://team/model"
        config = load_run_file(ROOT / "configs/qwen2-5-vl-7b.yaml", [weights, "data.source=builtin:digits"])
        failed = [one for one in api.check(config) if one.state == "failed"]
        planned = api.plan(config)
    assert time.monotonic() - began < 30, "one request of a run takes three minutes"
    assert [(one.subject, one.code) for one in failed] == [("model", 69)]
    assert planned.state == "amber" and any(f"{scheme}://team/model" in note for note in planned.as_dict()["notes"])


class Planned(Exception):
    """Ends a command where it plans."""


def test_other_commands_that_somebody_waits_for_plan_as_soon(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_run(config: RunConfig) -> Plan:
        raise Planned(must_answer_soon())

    for module in (submit_job, plan):
        monkeypatch.setattr(module, "plan_run", plan_run)
    rates = "{train.optimizer.learning_rate: {double_value_spec: {min_value: 1.0e-5, max_value: 1.0e-4}}}"
    config = load_run_file(ROOT / "configs/digits.yaml", [f"tune={{parameters: {rates}}}"])
    for command in (lambda: submit_job._of_training(config), lambda: tune._approval(config, yes=True)):
        with pytest.raises(Planned) as ended:
            command()
        assert ended.value.args == (True,)


def test_the_hub_is_asked_again_once_the_last_block_has_ended() -> None:
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    with without_hub():
        with without_hub():
            pass
        assert constants.HF_HUB_OFFLINE
    assert before == constants.HF_HUB_OFFLINE
