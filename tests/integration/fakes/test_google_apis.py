"""The stand-in for the services that the doctor asks is strict: status and reason of each request with one fault."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.google_apis import FakeGoogle
from vlmpipe.rehearsal.http_server import ApiError

ME, JOBS, PERSON = "me@p.iam.gserviceaccount.com", "jobs@p.iam.gserviceaccount.com", "someone@example.com"
IMAGE = f"us-docker.pkg.dev/p/images/trainer@sha256:{'1' * 64}"
SERVICES = ("iam", "iamcredentials", "storage", "secretmanager", "bigquery", "compute", "monitoring")
QUOTA = "serviceusage/v1beta1/projects/p/services/aiplatform.googleapis.com/consumerQuotaMetrics/{}"
SERIES = "monitoring/v3/projects/p/timeSeries?interval.startTime={}&interval.endTime={}&filter={}"
ZONES = "compute/compute/v1/projects/p/aggregated/{}?filter={}"
TEST = {"permissions": ["storage.objects.get"]}


@pytest.fixture
def google() -> Iterator[FakeGoogle]:
    with FakeGoogle("p") as running:
        running.enabled = {f"{name}.googleapis.com" for name in (*SERVICES, "cloudresourcemanager")}
        running.buckets, running.accounts = {"b"}, {ME, JOBS}
        running.secrets, running.tables = {"projects/p/secrets/s"}, {"p.d.t"}
        running.limits = {("aiplatform.googleapis.com/cpus", ""): 8}
        running.repositories.add("others")
        running.images = {IMAGE: ["amd64"]}
        for role in ("roles/serviceusage.serviceUsageViewer", "roles/compute.viewer"):
            running.bind("project", role, f"serviceAccount:{ME}")
        running.bind(ME, "roles/iam.serviceAccountTokenCreator", f"serviceAccount:{ME}")
        running.bind("project", "roles/iam.securityReviewer", f"serviceAccount:{JOBS}")
        running.bind("images", "roles/artifactregistry.reader", f"serviceAccount:{ME}")
        yield running


def ask(
    google: FakeGoogle, method: str, path: str, body: Any = None, caller: str = ME, **headers: str
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(google.endpoint.removeprefix("http://"), timeout=10)
    try:
        sent = {"Authorization": f"Bearer token-of-{caller}", "Content-Type": "application/json", **headers}
        connection.request(method, f"/{path}", json.dumps(body or {}), sent)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")
    finally:
        connection.close()


REFUSED: dict[str, tuple[str, str, Any, int, str]] = {
    "an unknown service": ("GET", "translate/v3/x", None, 403, "has not been used"),
    "an unknown route": ("GET", "storage/storage/v1/b", None, 501, "no such route"),
    "another method": ("DELETE", "storage/storage/v1/b/b/iam", None, 501, "no such route"),
    "no such bucket": (
        "GET", "storage/storage/v1/b/none/iam/testPermissions?permissions=storage.objects.get", None, 404, "not exist"
    ),
    "no permissions asked for": ("GET", "storage/storage/v1/b/b/iam/testPermissions", None, 400, "must not be empty"),
    "a permission of something else": (
        "GET", "storage/storage/v1/b/b/iam/testPermissions?permissions=iam.roles.get", None, 400, "not valid"
    ),
    "a bucket's policy without the right to read it": ("GET", "storage/storage/v1/b/b/iam", None, 403, "getIamPolicy"),
    "a project's policy without the right to read it": (
        "POST", "cloudresourcemanager/v1/projects/p:getIamPolicy", {}, 403, "getIamPolicy"
    ),
    "another project": (
        "POST", "cloudresourcemanager/v1/projects/other:testIamPermissions", TEST, 403, "does not have permission"
    ),
    "no such account": (
        "POST", "iam/v1/projects/-/serviceAccounts/none@p:testIamPermissions", {"permissions": ["iam.x.y"]}, 404,
        "account",
    ),
    "a token without the right to it": (
        "POST", f"iamcredentials/v1/projects/-/serviceAccounts/{JOBS}:generateAccessToken",
        {"scope": ["a"], "lifetime": "300s"}, 403, "getAccessToken",
    ),
    "a token of nobody": (
        "POST", "iamcredentials/v1/projects/-/serviceAccounts/none@p:generateAccessToken", {}, 404, "Not found"
    ),
    "a token for more than an hour": (
        "POST", f"iamcredentials/v1/projects/-/serviceAccounts/{ME}:generateAccessToken",
        {"scope": ["a"], "lifetime": "3601s"}, 400, "at most 3600s",
    ),
    "a wildcard": (
        "POST", "cloudresourcemanager/v1/projects/p:testIamPermissions", {"permissions": ["storage.*"]}, 400,
        "wildcard",
    ),
    "no permissions of a project asked for": (
        "POST", "cloudresourcemanager/v1/projects/p:testIamPermissions", {"permissions": []}, 400, "must not be empty"
    ),
    "31 names": (
        "GET", "serviceusage/v1/projects/p/services:batchGet?" + "&".join(["names=projects/p/services/a"] * 31), None,
        400, "1 to 30",
    ),
    "no such table": (
        "POST", "bigquery/bigquery/v2/projects/p/datasets/d/tables/none:testIamPermissions", TEST, 404, "Not found"
    ),
    "a partition's policy": (
        "POST", "bigquery/bigquery/v2/projects/p/datasets/d/tables/t$2026:testIamPermissions",
        {"permissions": ["bigquery.tables.get"]}, 400, "whole table",
    ),
    "a permission of another service on a secret": (
        "POST", "secretmanager/v1/projects/p/secrets/s:testIamPermissions", TEST, 400, "not valid"
    ),
    "names that are no services of the project": (
        "GET", "serviceusage/v1/projects/p/services:batchGet?names=aiplatform", None, 400, "names"
    ),
    "no names": ("GET", "serviceusage/v1/projects/p/services:batchGet", None, 400, "names"),
    "a quota of another service": ("GET", QUOTA.format("compute.googleapis.com%2Fcpus"), None, 404, "not found"),
    "an unknown quota": ("GET", QUOTA.format("aiplatform.googleapis.com%2Fgpus"), None, 404, "not found"),
    "a filter that is none": ("GET", SERIES.format("1", "2", "cpus"), None, 400, "cannot be read"),
    "an interval that goes back": ("GET", SERIES.format("2", "1", "cpus"), None, 400, "cannot be read"),
    "a list's filter that is none": ("GET", ZONES.format("machineTypes", "g2"), None, 400, "filter"),
    "a name in capitals": (
        "GET", ZONES.format("acceleratorTypes", "name%20%3D%20%22NVIDIA_L4%22"), None, 400, "filter"
    ),
    "an unknown list": ("GET", ZONES.format("disks", "name%20%3D%20%22a%22"), None, 501, "no such route"),
    "no such image": ("GET", "images/us-docker.pkg.dev/v2/p/images/none/manifests/1", None, 404, "Failed to fetch"),
    "a manifest in a form that is not accepted": (
        "GET", f"images/us-docker.pkg.dev/v2/p/images/trainer/manifests/sha256:{'1' * 64}", None, 404,
        "MANIFEST_UNKNOWN",
    ),
    "an image of another repository": (
        "GET", "images/us-docker.pkg.dev/v2/p/others/trainer/manifests/1", None, 403, "downloadArtifacts"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_with_one_fault_is_refused(google: FakeGoogle, name: str) -> None:
    method, path, body, code, said = REFUSED[name]
    found, answer = ask(google, method, path, body)
    error = answer["error"] if "error" in answer else answer["errors"][0]  # the registry's form
    assert (found, said in f"{error['code']} {error['message']}") == (code, True), answer


@pytest.mark.parametrize(("version", "code", "given"), [(0, 200, 1), (1, 200, 1), (2, 400, None), (3, 200, 3)])
def test_a_policy_has_a_version_that_is_valid_and_conditions_in_the_third(
    google: FakeGoogle, version: int, code: int, given: int | None
) -> None:
    google.bind_with_condition("project", "roles/storage.objectViewer", f"serviceAccount:{ME}", "some")
    asked = {"options": {"requestedPolicyVersion": version}}
    path = "cloudresourcemanager/v1/projects/p:getIamPolicy"
    found, answer = ask(google, "POST", path, asked, caller=JOBS)
    assert (found, answer.get("version")) == (code, given)
    assert any("condition" in one for one in answer.get("bindings", ())) == (given == 3)


def test_zones_come_in_pages_and_those_that_are_down_are_named(google: FakeGoogle) -> None:
    google.zones, google.down = {"g2": ["r1-a", "r1-b", "r1-c", "r1-d"]}, {"r1-d"}
    path = ZONES.format("machineTypes", "name%20%3D%20%22g2%22")
    assert ask(google, "GET", path)[0] == 503
    path += "&returnPartialSuccess=true"
    pages = [ask(google, "GET", f"{path}{more}")[1] for more in ("", "&pageToken=2")]
    assert [[place for place, one in page["items"].items() if "machineTypes" in one] for page in pages] == [
        ["zones/r1-a", "zones/r1-b"], ["zones/r1-c"]
    ]  # fmt: skip
    assert [page.get("nextPageToken") for page in pages] == ["2", None]
    assert {place for page in pages for place in page["unreachables"]} == {"zones/r1-d"}


def test_a_persons_request_counts_against_a_project_that_the_person_may_use(google: FakeGoogle) -> None:
    path, body = "cloudresourcemanager/v1/projects/p:testIamPermissions", TEST
    for header, reason in (({}, "SERVICE_DISABLED"), ({"X-Goog-User-Project": "p"}, "USER_PROJECT_DENIED")):
        code, answer = ask(google, "POST", path, body, caller=PERSON, **header)
        assert (code, answer["error"]["details"][0]["reason"]) == (403, reason)
    google.bind("project", "roles/serviceusage.serviceUsageConsumer", f"user:{PERSON}")
    assert ask(google, "POST", path, body, caller=PERSON, **{"X-Goog-User-Project": "p"}) == (200, {})
    code, answer = ask(google, "POST", path, body, caller=PERSON, **{"X-Goog-User-Project": "other"})
    assert (code, "other" in answer["error"]["message"]) == (403, True)


def test_blobs_are_at_another_address(google: FakeGoogle) -> None:
    path = "images/us-docker.pkg.dev/v2/p/images/trainer/blobs/sha256:amd64"
    assert ask(google, "GET", path)[0] == 302
    google.repositories = set()
    assert ask(google, "GET", path)[1]["errors"][0]["code"] == "NAME_UNKNOWN"


@pytest.mark.parametrize("caller", ["", "me token"])
def test_a_request_without_a_token_is_unauthenticated(google: FakeGoogle, caller: str) -> None:
    assert ask(google, "GET", "storage/storage/v1/b/b/iam", Authorization=f"Bearer {caller}")[0] == 401


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_is_not_enabled_says_so(google: FakeGoogle, service: str) -> None:
    google.enabled.remove(f"{service}.googleapis.com")
    code, answer = ask(google, "GET", f"{service}/v1/anything")
    assert (code, answer["error"]["details"][0]["reason"]) == (403, "SERVICE_DISABLED")


def test_an_account_is_told_what_it_may_do_itself(google: FakeGoogle) -> None:
    path = "storage/storage/v1/b/b/iam/testPermissions?permissions=storage.objects.get&permissions=storage.objects.list"
    assert ask(google, "GET", path) == (200, {})
    google.bind("gs://b", "roles/storage.objectViewer", f"serviceAccount:{JOBS}")
    assert ask(google, "GET", path) == (200, {})
    found = ask(google, "GET", path, caller=JOBS)
    assert found == (200, {"permissions": ["storage.objects.get", "storage.objects.list"]})
    assert ask(google, "POST", "secretmanager/v1/projects/p/secrets/none:testIamPermissions",
               {"permissions": ["secretmanager.versions.access"]}) == (200, {})  # fmt: skip


def test_a_role_that_google_does_not_have_cannot_be_granted(google: FakeGoogle) -> None:
    with pytest.raises(ApiError, match="is not supported"):
        google.bind("project", "roles/vlmpipe.everything", f"serviceAccount:{ME}")
