"""Where weights are said to be, and that no check asks the hub."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe import api
from vlmpipe.config.run_config import load_run_file
from vlmpipe.pipelines.checks.weights_look import look_at_weights
from vlmpipe.trainer.config.model import WeightsConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.hub_errors import without_hub
from vlmpipe.trainer.storage.model_folders import local_folder


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


def test_the_hub_is_asked_again_once_the_last_block_has_ended() -> None:
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    with without_hub():
        with without_hub():
            pass
        assert constants.HF_HUB_OFFLINE
    assert before == constants.HF_HUB_OFFLINE
