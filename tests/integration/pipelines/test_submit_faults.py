"""`vlmpipe submit` when something fails: a sentence, an exit code, and never a second job."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.auth.credentials import Credentials
from google.auth.exceptions import RefreshError

from tests.fakes.vertex.server import FakeVertex, Fault
from tests.support.vertex.submit_runs import MINE, Submit, running_vertex, submitter
from vlmpipe.google_cloud import client as vertex_api
from vlmpipe.platforms.vertex import submit


@pytest.fixture
def vertex(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    with running_vertex(monkeypatch) as server:
        yield server


@pytest.fixture
def vlmpipe_submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Submit:
    return submitter(tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (Fault("status", code=403, message="Permission 'x' denied"), 77, "Permission 'x' denied"),
        (Fault("status", code=403, message="not used", reason="SERVICE_DISABLED"), 69, "gcloud services enable"),
        (Fault("status", code=404, message="no such place"), 64, "gcp.location"),
        (Fault("status", code=400, message="bad field z"), 64, "bad field z"),
        (Fault("status", code=429, message="pipeline quota"), 69, "quota"),
        (Fault("status", code=500, times=9999), 69, "not known"),
        (Fault("status", code=503, times=9999), 69, "not known"),
        (Fault("drop_before", times=9999), 69, "submit again only if it is not there"),
        (Fault("reset", times=9999), 69, "submit again only if it is not there"),
    ],
    ids=lambda value: f"{value.action}-{value.code}" if isinstance(value, Fault) else "",
)
def test_a_fault_is_a_sentence_and_a_code(
    vertex: FakeVertex, vlmpipe_submit: Submit, fault: Fault, code: int, said: str
) -> None:
    vertex.faults.append(replace(fault))
    answer = vlmpipe_submit()
    assert (answer.code, answer.out, vertex.jobs) == (code, "", {})
    assert said in answer.err
    assert answer.err.startswith("error: ")
    assert "Traceback" not in answer.err
    assert "0x" not in answer.err


@pytest.mark.parametrize(
    ("place", "code", "said"),
    [
        ("gcp.project=other-project", 77, "no permission in project other-project, or there is no such project"),
        ("gcp.location=europe-west4", 64, "The location projects/test-project/locations/europe-west4 does not exist"),
    ],
)
def test_a_place_that_is_not_there_is_named(
    vertex: FakeVertex, vlmpipe_submit: Submit, place: str, code: int, said: str
) -> None:
    project, others = (place, []) if place.startswith("gcp.project") else (MINE, [place])
    answer = vlmpipe_submit(*others, "--force", project=project)  # else the bucket, which is elsewhere, would be named
    assert (answer.code, vertex.jobs, said in answer.err) == (code, {}, True)


@pytest.mark.parametrize("action", ["status", "drop_before", "reset"])
def test_a_passing_fault_passes(vertex: FakeVertex, vlmpipe_submit: Submit, action: Any) -> None:
    vertex.faults.append(Fault(action, times=2))
    assert (vlmpipe_submit().code, len(vertex.jobs), len(vertex.requests)) == (0, 1, 3)


def test_a_lost_answer_makes_no_second_job(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    vertex.faults += [Fault("drop_after"), Fault("status", method="GET")]
    answer = vlmpipe_submit("--json")
    assert (answer.code, len(vertex.jobs)) == (0, 1)
    assert answer.json["resource_name"] in vertex.jobs
    assert len({request for request in vertex.requests if request.startswith("POST")}) == 1


def test_a_job_that_cannot_be_looked_up_is_not_reported_as_missing(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    vertex.faults += [Fault("drop_after"), Fault("status", method="GET", times=9999)]
    answer = vlmpipe_submit()
    assert (answer.code, len(vertex.jobs), "not known" in answer.err) == (69, 1, True)


def test_a_refusal_after_a_lost_answer_does_not_deny_the_job(vertex: FakeVertex, vlmpipe_submit: Submit) -> None:
    vertex.faults += [Fault("drop_after"), Fault("status", code=403, message="revoked")]
    answer = vlmpipe_submit()
    assert (answer.code, len(vertex.jobs)) == (69, 1)
    assert "revoked; whether the run was started is not known" in answer.err


def test_another_job_of_the_same_name_is_an_error(
    vertex: FakeVertex, vlmpipe_submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "job_id_at", lambda config, moment: "same-name")
    vlmpipe_submit()
    answer = vlmpipe_submit()
    assert (answer.code, len(vertex.jobs), "exists already" in answer.err) == (69, 1, True)


def test_a_closed_port_is_reported_at_once(
    vertex: FakeVertex, vlmpipe_submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv(vertex_api.ENDPOINT_VARIABLE, f"http://localhost:{taken.getsockname()[1]}")
        answer = vlmpipe_submit()
    assert (answer.code, "does not answer" in answer.err, "refused" in answer.err) == (69, True, True)
    assert "not known" not in answer.err


@pytest.mark.parametrize(
    ("address", "said"),
    [("http://vertex.example.com", "without encryption"), ("localhost:80/path", "expected: a host")],
)
def test_an_address_that_would_leak_or_cannot_be_is_refused(
    vlmpipe_submit: Submit, monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    monkeypatch.setenv(vertex_api.ENDPOINT_VARIABLE, address)
    answer = vlmpipe_submit()
    assert (answer.code, said in answer.err) == (64, True)


def test_no_credentials_are_a_sentence(vlmpipe_submit: Submit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(vertex_api.ENDPOINT_VARIABLE, raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    answer = vlmpipe_submit()
    assert (answer.code, "gcloud auth application-default login" in answer.err) == (67, True)
    assert "Traceback" not in answer.err


class Login(Credentials):
    """Credentials of a person whose login has run out, or whom the vertex does not know."""

    def __init__(self, *, run_out: bool) -> None:
        super().__init__()
        self.run_out = run_out

    def refresh(self, request: object) -> None:
        if self.run_out:
            raise RefreshError("Reauthentication is needed. Please run a command.", {"error": "invalid_grant"})
        self.token = "token"


@pytest.mark.parametrize(
    ("run_out", "said", "asked"),
    [(True, "Reauthentication is needed", False), (False, "Request had invalid credentials", True)],
)
def test_credentials_that_are_not_good_are_a_sentence(
    vertex: FakeVertex,
    vlmpipe_submit: Submit,
    monkeypatch: pytest.MonkeyPatch,
    run_out: bool,
    said: str,
    asked: bool,
) -> None:
    vertex.faults.append(Fault("status", code=401, message="Request had invalid credentials.", times=9999))
    monkeypatch.setattr(vertex_api, "credentials_for", lambda address: Login(run_out=run_out))
    answer = vlmpipe_submit()
    assert (answer.code, bool(vertex.requests), vertex.jobs) == (67, asked, {})
    assert said in answer.err
    assert "gcloud auth application-default login" in answer.err
    assert "invalid_grant" not in answer.err
