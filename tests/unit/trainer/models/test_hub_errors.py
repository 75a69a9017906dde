"""What keeps a model of the hub from being read is said in a sentence of its own, and a secret's token is sent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoConfig

from tests.fakes.hub import FakeHub, Repository, running_hub
from tests.fakes.receiver import Receiver
from tests.support.short_form import only_whole
from vlmpipe.trainer.config.model import WeightsConfig
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.models.hf_native.pretrained import load_pretrained
from vlmpipe.trainer.secret_manager import use_hub_token

CONTENT = b'{"model_type": "qwen2"}'
MODEL = WeightsConfig(weights="org/model")
TOKEN = "t" * 40


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with running_hub(org__model=Repository(content=CONTENT)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setenv("HF_TOKEN", "")  # restored afterwards
        monkeypatch.delenv("HF_TOKEN")
        yield server


def failure(model: WeightsConfig = MODEL) -> UserError:
    with pytest.raises(UserError) as caught:
        load_pretrained(AutoConfig, model)
    return caught.value


def test_a_public_model_is_read(hub: FakeHub) -> None:
    assert load_pretrained(AutoConfig, MODEL).model_type == "qwen2"
    assert "/org/model/resolve/main/config.json" in hub.requests


def test_each_reason_has_its_own_sentence(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/gated"] = Repository(content=CONTENT, readers=(TOKEN,), gated=True)
    gated = WeightsConfig(weights="org/gated")
    found = {"no token": failure(gated)}
    monkeypatch.setenv("HF_TOKEN", "of-somebody-else")
    found["no licence"] = failure(gated)
    found["no name"] = failure(WeightsConfig(weights="org/modle"))
    found["no revision"] = failure(WeightsConfig(weights="org/model", revision="v2"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found["offline"] = failure()
    assert {name: error.found for name, error in found.items()} == {
        "no token": "org/gated is gated, and no valid token was sent",
        "no licence": "org/gated is gated, and your account has no access",
        "no name": "the hub has no model org/modle that your token may read",
        "no revision": "org/model has no revision v2",
        "offline": "org/model is not on this machine, and HF_HUB_OFFLINE is set",
    }
    assert len({error.fix for error in found.values()}) == len(found), "and its own remedy"
    for name, code in (("no token", 77), ("no licence", 77), ("offline", 69)):
        assert found[name].code == code


@only_whole
def test_a_hub_out_of_reach_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    error = failure()
    assert error.found == "org/model is not on this machine, and http://127.0.0.1:9 does not answer"
    assert error.code == ExitCode.UNAVAILABLE


def test_the_token_of_a_secret_opens_a_gated_model_and_is_not_printed(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["org/model"] = Repository(content=CONTENT, readers=(TOKEN,), gated=True)
    with Receiver() as receiver:
        receiver.secrets = {"projects/p/secrets/hub/versions/latest": TOKEN}
        monkeypatch.setattr("vlmpipe.trainer.secret_manager.SECRET_MANAGER", receiver.address)
        use_hub_token(None)
        assert "HF_TOKEN" not in os.environ
        use_hub_token("projects/p/secrets/hub")
        with pytest.raises(UserError, match=r"model.hub_token_secret: no permission to read projects/p/secrets/forbid"):
            use_hub_token("projects/p/secrets/forbidden")
    assert load_pretrained(AutoConfig, MODEL).model_type == "qwen2"
    assert TOKEN not in "".join(capfd.readouterr())


def test_a_tokenizer_that_cannot_be_read_says_the_same(hub: FakeHub) -> None:
    hub.repositories["org/model"] = Repository(readers=(TOKEN,), gated=True)
    with pytest.raises(UserError, match="org/model is gated, and no valid token was sent"):
        make_tokenizer("org/model", [])
