"""What `vlmpipe doctor` says of models on the hub, against a strict one."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from huggingface_hub import constants

from tests.fakes.hub import FakeHub, Repository, running_hub
from tests.fakes.receiver import Receiver
from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.doctor import hub as looked_up
from vlmpipe.doctor.hub import hub_rows
from vlmpipe.doctor.rows import Row, State

TOKEN = "hf_" + 34 * "a"
TOWER = {"model.tower": "{weights: org/tower, revision: v1}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub(org__tower=Repository(revisions=("main", "v1"))) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def config(**fields: str) -> RunConfig:
    values = {"gcp.project": "", "gcp.pipeline_root": ""}
    values |= {name.replace("__", "."): value for name, value in fields.items()}
    return load_run_file(ROOT / "configs/digits.yaml", [f"{name}={value}" for name, value in values.items()])


def lookups(**fields: str) -> list[Row]:
    return list(hub_rows(config(**fields).model))


def test_a_run_file_that_names_nothing_remote_needs_no_lookup() -> None:
    assert lookups() == []


def test_a_model_of_the_hub_is_found(hub: FakeHub) -> None:
    (found,) = lookups(**TOWER)
    assert (found.state, found.text) == ("ok", "model.tower: org/tower at revision v1 may be read")
    assert hub.requests == ["/org/tower/resolve/v1/config.json"]


def gated(hub: FakeHub) -> None:
    hub.repositories["org/tower"] = Repository(revisions=("v1",), readers=("other",), gated=True)


def private(hub: FakeHub) -> None:
    hub.repositories["org/tower"] = Repository(revisions=("v1",), readers=("other",))


def without_revision(hub: FakeHub) -> None:
    hub.repositories["org/tower"] = Repository()


def without_config(hub: FakeHub) -> None:
    hub.repositories["org/tower"] = Repository(revisions=("v1",), files=("model.gguf",))


def disabled(hub: FakeHub) -> None:
    hub.repositories["org/tower"].disabled = True


def behind_a_proxy(hub: FakeHub) -> None:
    hub.is_hub = False


def asked_too_often(hub: FakeHub) -> None:
    hub.status = 429


def failing(hub: FakeHub) -> None:
    hub.status = 503


def refusing(hub: FakeHub) -> None:
    hub.status = 403


FAULTS: list[tuple[Callable[[FakeHub], None], State, tuple[str, ...]]] = [
    (
        lambda hub: hub.repositories.clear(),
        "missing",
        ("no model org/tower that your token may read", "correct the id"),
    ),
    (private, "missing", ("no model org/tower that your token may read", "HF_TOKEN")),
    (gated, "missing", ("gated", "no valid token was sent", "set model.hub_token_secret or HF_TOKEN")),
    (without_revision, "missing", ("has no revision v1", "/org/tower/commits/main")),
    (without_config, "missing", ("has no config.json", "transformers' format")),
    (disabled, "missing", ("disabled on the hub", "another model")),
    (behind_a_proxy, "cannot see", ("what answers there is not the hub", "HF_ENDPOINT")),
    (asked_too_often, "cannot see", ("too many requests", "try again in 300 seconds")),
    (failing, "cannot see", ("HTTP 503", "try again")),
    (refusing, "missing", ("refuses your token", "hf auth login")),
]


@pytest.mark.parametrize(("fault", "state", "words"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_fault_of_the_hub_is_one_sentence_with_a_fix(
    hub: FakeHub, fault: Callable[[FakeHub], None], state: State, words: tuple[str, ...]
) -> None:
    fault(hub)
    (found,) = lookups(**TOWER)
    assert found.state == state
    assert found.text.startswith("model.tower: ") and "\n" not in found.text + found.fix
    assert all(word in f"{found.text}; {found.fix}" for word in words)


def test_the_users_token_opens_a_private_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/tower"] = Repository(revisions=("v1",), readers=(TOKEN,))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (found,) = lookups(**TOWER)
    assert found.state == "ok"


def test_terms_that_were_not_accepted_are_told_from_a_missing_token(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated(hub)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (found,) = lookups(**TOWER)
    assert found.state == "missing" and "accept its terms at http" in found.fix


def test_the_hub_is_asked_with_the_token_of_the_jobs(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/tower"] = Repository(revisions=("v1",), readers=(TOKEN,))
    with Receiver() as receiver:
        receiver.secrets = {"projects/p/secrets/hub/versions/latest": TOKEN}
        monkeypatch.setattr("vlmpipe.trainer.secret_manager.SECRET_MANAGER", receiver.endpoint)
        monkeypatch.setenv("HF_TOKEN", "restored afterwards")
        found = lookups(**TOWER, model__hub_token_secret="projects/p/secrets/hub")
        assert [one.state for one in found] == ["ok", "ok"]
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        found = lookups(**TOWER, model__hub_token_secret="projects/p/secrets/forbidden")
    assert [one.state for one in found] == ["cannot see", "ok"]
    assert "no permission to read projects/p/secrets/forbidden" in found[0].text
    assert "asked with your own token" in found[0].text
    assert all(TOKEN not in one.text for one in found)


def test_a_hub_that_does_not_answer_is_given_up_after_the_timeout(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/{revision}/{filename}")
        monkeypatch.setattr(looked_up, "TIMEOUT_S", 0.2)
        (found,) = lookups(**TOWER)
    assert found.state == "cannot see"
    assert "no answer within 0.2 s" in found.text


def test_offline_mode_is_respected(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (found,) = lookups(**TOWER)
    assert (found.state, hub.requests) == ("cannot see", [])
