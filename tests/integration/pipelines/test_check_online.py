"""`vlmpipe check --online` against a strict hub and a fake of Cloud Storage."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from huggingface_hub import constants

from tests.fakes.gcs.server import FakeGcs, Fault
from tests.fakes.hub import FakeHub, Repository, running_hub
from tests.fakes.receiver import Receiver
from tests.support.paths import ROOT
from vlmpipe.cli import app as cli
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.pipelines import check_online as online
from vlmpipe.pipelines.check import Finding, exit_code
from vlmpipe.pipelines.check_online import check_online
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.storage.s3 import S3Storage

TOKEN = "hf_" + 34 * "a"
TOWER = {"model.tower": "{weights: org/tower, revision: v1}"}
DATA = {"data.source": "gs://my-data/llava/data.json"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub(org__tower=Repository(revisions=("main", "v1"))) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["my-data", "my-runs"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        yield server


def config(**fields: str) -> RunConfig:
    values = {"gcp.project": "", "gcp.pipeline_root": ""}
    values |= {name.replace("__", "."): value for name, value in fields.items()}
    return load_run_file(ROOT / "configs/digits.yaml", [f"{name}={value}" for name, value in values.items()])


def lookups(subject: str, **fields: str) -> list[Finding]:
    return [one for one in check_online(config(**fields)) if one.subject == subject]


def test_a_run_file_that_names_nothing_remote_needs_no_lookup() -> None:
    assert check_online(config()) == []


def test_a_model_of_the_hub_is_found(hub: FakeHub) -> None:
    (found,) = lookups("hub", **TOWER)
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


def failing(hub: FakeHub) -> None:
    hub.status = 503


def refusing(hub: FakeHub) -> None:
    hub.status = 403


FAULTS: list[tuple[Callable[[FakeHub], None], int, tuple[str, ...]]] = [
    (lambda hub: hub.repositories.clear(), 66, ("no model org/tower that your token may read", "correct the id")),
    (private, 66, ("no model org/tower that your token may read", "HF_TOKEN")),
    (gated, 77, ("gated", "no valid token was sent", "set model.hub_token_secret or HF_TOKEN")),
    (without_revision, 66, ("has no revision v1", "/org/tower/commits/main")),
    (without_config, 66, ("has no config.json", "transformers' format")),
    (failing, 69, ("HTTP 503", "try again")),
    (refusing, 77, ("refuses your token", "hf auth login")),
]


@pytest.mark.parametrize(("fault", "code", "words"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_fault_of_the_hub_is_one_sentence_with_a_fix(
    hub: FakeHub, fault: Callable[[FakeHub], None], code: int, words: tuple[str, ...]
) -> None:
    fault(hub)
    (found,) = lookups("hub", **TOWER)
    assert (found.state, found.code, exit_code([found])) == ("failed", code, code)
    assert found.text.startswith("model.tower: ") and "\n" not in found.text
    assert all(word in found.text for word in words)


def test_the_users_token_opens_a_private_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/tower"] = Repository(revisions=("v1",), readers=(TOKEN,))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (found,) = lookups("hub", **TOWER)
    assert found.state == "ok"


def test_terms_that_were_not_accepted_are_told_from_a_missing_token(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated(hub)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (found,) = lookups("hub", **TOWER)
    assert found.code == ExitCode.NO_PERMISSION and "accept its terms at http" in found.text


def test_the_hub_is_asked_with_the_token_of_the_jobs(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["org/tower"] = Repository(revisions=("v1",), readers=(TOKEN,))
    with Receiver() as receiver:
        receiver.secrets = {"projects/p/secrets/hub/versions/latest": TOKEN}
        monkeypatch.setattr("vlmpipe.trainer.secret_manager.SECRET_MANAGER", receiver.address)
        monkeypatch.setenv("HF_TOKEN", "restored afterwards")
        found = lookups("hub", **TOWER, model__hub_token_secret="projects/p/secrets/hub")
        assert [one.state for one in found] == ["ok", "ok"]
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        found = lookups("hub", **TOWER, model__hub_token_secret="projects/p/secrets/forbidden")
    assert [one.state for one in found] == ["unchecked", "ok"]
    assert "no permission to read projects/p/secrets/forbidden" in found[0].text
    assert "asked with your own token" in found[0].text
    assert all(TOKEN not in one.text for one in found)


def test_weights_in_a_bucket_are_found(gcs: FakeGcs) -> None:
    weights = {"model__tower": "{weights: gs://my-data/clip}"}
    (found,) = lookups("storage", **weights)
    assert (found.state, found.code) == ("failed", ExitCode.NOT_FOUND)
    assert "model.tower: nothing is stored under gs://my-data/clip/" in found.text
    gcs.client().bucket("my-data").blob("clip/config.json").upload_from_string(b"{}")
    assert [one.state for one in lookups("storage", **weights)] == ["ok"]


def test_a_hub_that_does_not_answer_fails_after_the_timeout(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/{revision}/{filename}")
        monkeypatch.setattr(online, "TIMEOUT_S", 0.2)
        (found,) = lookups("hub", **TOWER)
    assert (found.state, found.code) == ("failed", ExitCode.UNAVAILABLE)
    assert "no answer within 0.2 s" in found.text


def test_offline_mode_is_respected(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (found,) = lookups("hub", **TOWER)
    assert (found.state, hub.requests) == ("unchecked", [])


def test_data_and_root_on_cloud_storage_are_found(gcs: FakeGcs) -> None:
    gcs.client().bucket("my-data").blob("llava/data.json").upload_from_string(b"[]")
    found = lookups("storage", **DATA, output__root_uri="gs://my-runs/new")
    assert [(one.state, one.text) for one in found] == [
        ("ok", "data.source: gs://my-data/llava/data.json exists"),
        ("ok", "output.root_uri: gs://my-runs/new is in a bucket that exists"),
    ]


def test_a_pattern_is_looked_up_by_its_fixed_part(gcs: FakeGcs) -> None:
    gcs.client().bucket("my-data").blob("tars/train-000003.tar").upload_from_string(b"")
    (found,) = lookups("storage", data__source="'gs://my-data/tars/train-{000000..000009}.tar'")
    assert found.state == "ok"


def closed(server: FakeGcs) -> None:
    server.faults.append(Fault("status", code=403))


def silent(server: FakeGcs) -> None:
    server.faults.append(Fault("status", code=503, times=99))


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (lambda server: None, 66, "nothing is stored under gs://my-data/llava/data.json; correct"),
        (lambda server: server.buckets.clear(), 66, "there is no bucket my-data; correct"),
        (closed, 77, "may not list objects of gs://my-data; ask for roles/storage.objectViewer"),
        (silent, 69, "Cloud Storage answers 503"),
    ],
    ids=["no object", "no bucket", "closed", "silent"],
)
def test_a_fault_of_cloud_storage_is_one_sentence_with_a_fix(
    gcs: FakeGcs, fault: Callable[[FakeGcs], None], code: int, words: str
) -> None:
    fault(gcs)
    (found,) = lookups("storage", **DATA)
    assert (found.state, found.code) == ("failed", code)
    assert found.text.startswith("data.source: ") and words in found.text


def test_the_example_project_is_not_looked_up(gcs: FakeGcs) -> None:
    found = lookups("storage", gcp__project="example-project", gcp__pipeline_root="gs://example-bucket/vlmpipe")
    assert [one.state for one in found] == ["unchecked"]
    assert gcs.requests == []


@pytest.mark.parametrize(
    ("location", "state", "words"),
    [("us-central1", "ok", "is a region"), ("us-centrall1", "failed", "did you mean us-central1?")],
)
def test_a_region_that_vertex_does_not_have_is_named(location: str, state: str, words: str) -> None:
    (found,) = lookups("region", gcp__project="example-project", gcp__location=location)
    assert found.state == state and words in found.text


def vlmpipe(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["vlmpipe", "check", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), json.loads(out) if out else err


def test_the_command_looks_up_only_when_asked_to(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.repositories.clear()
    arguments = ["configs/digits.yaml", "gcp.project=", "model.tokenizer=org/tower", "--json"]
    code, answer = vlmpipe(monkeypatch, capfd, *arguments)
    offline_requests = list(hub.requests)
    assert {check["subject"] for check in answer["checks"]}.isdisjoint({"hub", "storage", "region"})
    code, answer = vlmpipe(monkeypatch, capfd, *arguments, "--online")
    (found,) = [check for check in answer["checks"] if check["subject"] == "hub"]
    assert offline_requests == [] and code != 0 and found["state"] == "failed"


def test_a_job_spec_has_nothing_to_look_up(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    code, text = vlmpipe(monkeypatch, capfd, "--job-spec", "job.yaml", "--online")
    assert code == 64 and "--online is given with a job spec" in text


def test_addresses_on_s3_are_looked_up(s3: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.write("tars/train-000001.tar", b"bytes")
    found = {
        name: lookups("storage", data__source=f"'{s3.uri(name)}'")[0]
        for name in ("tars/train-{000000..000009}.tar", "tars", "nothing")
    }
    assert [one.state for one in found.values()] == ["ok", "ok", "failed"]
    assert found["nothing"].code == ExitCode.NOT_FOUND and "nothing is stored at s3://" in found["nothing"].text
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    (unanswered,) = lookups("storage", data__source=s3.uri("tars"))
    assert (unanswered.state, unanswered.code) == ("failed", ExitCode.UNAVAILABLE)
