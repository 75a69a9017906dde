"""`vlmpipe doctor` with Google's own auth library, against a strict stand-in for the services."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from google.oauth2.credentials import Credentials

from tests.fakes.google_apis import FakeGoogle
from tests.support.short_form import chosen
from tests.support.vertex.doctor_project import (
    BUCKETS,
    IMAGE,
    OF_THE_RUN,
    PROJECT,
    REGION,
    account,
    bindings,
    log_in,
    not_ok,
    row_of,
    run_file,
)
from vlmpipe.cli import app as cli
from vlmpipe.doctor import google_api
from vlmpipe.doctor.doctor import examine
from vlmpipe.doctor.google_api import GoogleApi
from vlmpipe.doctor.rows import Row, as_json, decision, exit_code


def test_a_project_of_terraforms_grants_is_ready(google: FakeGoogle) -> None:
    rows = examine(run_file())
    assert not_ok(rows) == []
    assert exit_code(rows) == 0 and decision(rows).startswith("Ready")
    subjects = {row.subject for row in rows}
    assert subjects == {"login", "region", "APIs", "quota", "image", "machine", "address", "bucket", *OF_THE_RUN}
    assert len(google.requests) <= len(rows), "one request a row"


GRANTS = {
    f"{name} {role.rpartition('/')[2]} on {resource}": (resource, role, name)
    for resource, role, name in bindings()
    if name in OF_THE_RUN
}
SHORT = ("trainer storage.objectViewer", "pipeline secretmanager", "submitter iam.serviceAccountTokenCreator")


@pytest.mark.parametrize("grant", chosen(GRANTS, lambda name: name.startswith(SHORT)))
def test_each_missing_grant_is_noticed_and_its_remedy_mends_it(google: FakeGoogle, grant: str) -> None:
    resource, role, name = GRANTS[grant]
    google.policies[resource][role].remove(f"serviceAccount:{account(name)}")
    config = run_file(f"model.tokenizer=gs://{BUCKETS['data']}/tokenizer")  # which a submission reads too
    found = not_ok(examine(config))
    assert found
    for row in found:
        google.run(row.fix)
    assert not_ok(examine(config)) == []


def test_a_run_that_serves_on_cloud_run_needs_its_api_and_roles_and_no_other_run_does(google: FakeGoogle) -> None:
    config = run_file("deploy={endpoint: digits, cloud_run: {}, image_uri: " + IMAGE + "}")
    found = not_ok(examine(config))
    assert {row.subject for row in found} == {"APIs", "pipeline"}
    for row in found:
        google.run(row.fix)
    assert not_ok(examine(config)) == [] == not_ok(examine(run_file()))
    assert "run.googleapis.com" in google.enabled
    assert set(google.policies["project"]) >= {"roles/run.developer", "roles/run.invoker"}


def test_all_remedies_together_make_an_empty_project_ready(google: FakeGoogle) -> None:
    google.policies.clear()
    google.buckets.clear()
    google.accounts -= {account("pipeline"), account("trainer")}
    google.enabled -= {"secretmanager.googleapis.com", "compute.googleapis.com"}
    google.limits = dict.fromkeys(google.limits, 0)
    for resource, role, name in (
        ("project", "roles/serviceusage.serviceUsageViewer", "submitter"),
        ("vlmpipe", "roles/artifactregistry.reader", "submitter"),
    ):
        google.bind(resource, role, f"serviceAccount:{account(name)}")
    rounds = 0
    while found := not_ok(examine(run_file())):
        before = str((google.policies, google.buckets, google.accounts, google.enabled, google.limits))
        for row in found:
            google.run(row.fix)
        assert before != str((google.policies, google.buckets, google.accounts, google.enabled, google.limits)), found
        rounds += 1
    assert 1 < rounds < 6


@pytest.mark.parametrize("table", ["my-project.d.t$20260101", "example.com:my-project.d.t"])
def test_a_table_s_grant_is_asked_of_the_whole_table_and_its_remedy_mends_it(google: FakeGoogle, table: str) -> None:
    google.tables.add(table.partition("$")[0])
    config = run_file(f"data.source=bq://{table}")
    found = not_ok(examine(config))
    assert found and all("roles/bigquery.dataViewer" in row.fix for row in found)
    for row in found:
        google.run(row.fix)
    assert not_ok(examine(config)) == []


def test_a_persons_requests_count_against_a_project_that_each_remedy_names(google: FakeGoogle) -> None:
    """The first contact of a person whose login has no project, or another one, for its requests."""
    person = "someone@example.com"

    def refusal(charged: str | None) -> google_api.CannotSee:
        login = Credentials(f"token-of-{person}", quota_project_id=charged)
        api = GoogleApi(PROJECT, "", login, google_api.Silence())
        with pytest.raises(google_api.CannotSee) as caught:
            api.granted("cloudresourcemanager", f"/v1/projects/{PROJECT}", ("storage.objects.get",))
        return caught.value

    found = refusal(None)
    assert found.why == "your login names no project that requests count against"
    google.run(found.fix)
    assert google.charged == [PROJECT]
    found = refusal(PROJECT)
    assert found.why == f"your account may not let its requests count against {PROJECT}"
    assert found.fix.endswith("--role=roles/serviceusage.serviceUsageConsumer --condition=None")
    google.run(found.fix.replace("YOUR_ACCOUNT", person))
    found = refusal("other")
    assert "is not enabled in other, which your login counts requests against" in found.why
    assert found.fix == "gcloud services enable cloudresourcemanager.googleapis.com --project=other"
    login = Credentials(f"token-of-{person}", quota_project_id=PROJECT)
    answer = GoogleApi(PROJECT, "", login, google_api.Silence()).granted(
        "cloudresourcemanager", f"/v1/projects/{PROJECT}", ("storage.objects.get",)
    )
    assert answer.status == 200


def test_the_hubs_token_that_only_the_jobs_may_read_is_noticed(google: FakeGoogle) -> None:
    """What the guides told everybody to do, and what ended each gated model's run in its first step."""
    secret = f"projects/{PROJECT}/secrets/hub"
    readers = google.policies[secret]["roles/secretmanager.secretAccessor"]
    readers.remove(f"serviceAccount:{account('pipeline')}")
    found = row_of(examine(run_file()), "pipeline")
    assert found.state == "missing" and "reads projects/my-project/secrets/hub (model.hub_token_secret)" in found.text
    member = f"--member=serviceAccount:{account('pipeline')} --role=roles/secretmanager.secretAccessor"
    assert found.fix == f"gcloud secrets add-iam-policy-binding hub {member} --project={PROJECT}"


def test_who_may_not_take_tokens_is_told_what_stays_unseen(google: FakeGoogle) -> None:
    for name in ("pipeline", "trainer"):
        google.policies[account(name)]["roles/iam.serviceAccountTokenCreator"].clear()
    rows = examine(run_file())
    found = not_ok(rows)
    assert [row.state for row in found] == ["cannot see", "cannot see"] and exit_code(rows) == 0
    assert "questions about vlmpipe-pipeline@my-project.iam.gserviceaccount.com are open" in found[0].text
    assert decision(rows).startswith("Nothing that can be seen is missing")


def test_jobs_without_an_account_of_their_own_are_asked_about_as_the_pipelines(google: FakeGoogle) -> None:
    found = row_of(examine(run_file("gcp.job_service_account=")), "trainer")
    assert "secrets.TOKEN" in found.text and account("pipeline") in found.fix


def test_the_pipelines_own_account_needs_no_other_token(
    google: FakeGoogle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log_in(monkeypatch, tmp_path, google, "pipeline")
    before = len(google.requests)
    own = GoogleApi.own(PROJECT)
    assert own.as_account(account("pipeline")) is own
    assert not any("generateAccessToken" in request for request in google.requests[before:])


def test_no_login_is_one_row_and_no_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, google: FakeGoogle
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    rows = examine(run_file())
    assert row_of(rows, "login").fix == "gcloud auth application-default login"
    assert exit_code(rows) == 79 and google.requests == []


def test_services_without_an_answer_are_asked_once_and_nothing_hangs(
    google: FakeGoogle, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = GoogleApi.own(PROJECT)  # beforehand: a busy machine may take longer for it than the limit below
    monkeypatch.setattr(GoogleApi, "own", lambda _project: own)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        alone = {name: address for name in google_api.ADDRESSES if name != "iamcredentials"}
        monkeypatch.setattr(google_api, "ADDRESSES", {**google_api.ADDRESSES, **alone})
        monkeypatch.setattr(google_api, "TIMEOUT_S", 0.2)
        started_s = time.monotonic()
        rows = examine(run_file())
        took_s = time.monotonic() - started_s
    assert {row.subject for row in not_ok(rows)} >= {"APIs", "quota", "image", "machine", *OF_THE_RUN}
    assert {row.state for row in not_ok(rows)} == {"cannot see"}
    assert all("no answer from" in row.text for row in not_ok(rows) if row.subject in ("APIs", "quota"))
    assert took_s < 10 * 0.2 + 3


def test_no_answer_from_the_token_service_is_one_row(google: FakeGoogle) -> None:
    google.silent.add("token")
    rows = examine(run_file())
    assert row_of(rows, "login").state == "cannot see"
    assert {row.subject for row in rows} == {"login", "region", "address"}


def test_the_stand_in_refuses_what_the_services_refuse(google: FakeGoogle) -> None:
    own = GoogleApi.own(PROJECT)
    assert own.get("serviceusage", f"/v1/projects/{PROJECT}/services:batchGet", names=["aiplatform"]).status == 400
    assert (
        own.granted("iam", f"/v1/projects/-/serviceAccounts/{account('pipeline')}", ("storage.objects.get",)).status
        == 400
    )
    assert (
        own.granted("iam", "/v1/projects/-/serviceAccounts/nobody@x.iam.gserviceaccount.com", ("iam.a.b",)).status
        == 404
    )
    assert (
        own.granted("secretmanager", f"/v1/projects/{PROJECT}/secrets/none", ("secretmanager.versions.access",)).content
        == {}
    )
    with pytest.raises(google_api.CannotSee, match="501"):
        own.get("storage", "/storage/v1/buckets")
    google.enabled.remove("iam.googleapis.com")
    with pytest.raises(google_api.CannotSee, match="is not enabled") as refused:
        own.granted("iam", f"/v1/projects/-/serviceAccounts/{account('pipeline')}", ("iam.serviceAccounts.actAs",))
    assert refused.value.fix == f"gcloud services enable iam.googleapis.com --project={PROJECT}"


def vlmpipe(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str
) -> tuple[int, str]:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run_file().to_dict()))
    monkeypatch.setattr(sys, "argv", ["vlmpipe", "doctor", str(file), *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0), capfd.readouterr().out


def test_the_command_prints_the_decision_first_and_remedies_whole(
    google: FakeGoogle, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, text = vlmpipe(monkeypatch, capfd, tmp_path)
    assert code == 0 and text.startswith("Ready: ")
    google.buckets.remove(BUCKETS["mirror"])
    code, text = vlmpipe(monkeypatch, capfd, tmp_path)
    lines = text.splitlines()
    assert code == 79 and lines[0].startswith("Not ready: 3 missing, ")
    assert lines[2].startswith("✗ ")
    command = f"    gcloud storage buckets create gs://{BUCKETS['mirror']} --project={PROJECT} --location={REGION}"
    assert [line.startswith(command) for line in lines].count(True) == 1, (
        "a command that mends three rows is printed once"
    )


def test_as_json_it_is_one_object_with_every_row(
    google: FakeGoogle, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    google.limits = dict.fromkeys(google.limits, 8)
    code, text = vlmpipe(monkeypatch, capfd, tmp_path, "--json")
    answer: dict[str, Any] = json.loads(text)
    assert (code, answer["exit_code"], answer["ok"]) == (79, 79, False)
    assert answer["counts"] == {"missing": 1, "cannot see": 0, "ok": len(answer["rows"]) - 1}
    assert answer.pop("assumptions") and answer.pop("notes")
    assert answer == as_json(examine(run_file()))


def test_nothing_seen_at_all_has_a_code_of_its_own() -> None:
    assert exit_code([Row("hub", "cannot see", "no answer")]) == 69
    assert decision([Row("hub", "cannot see", "no answer")]).startswith("Not known")
