"""Strict stand-in for the Google services that `vlmpipe doctor` asks, with accounts, roles and tokens.

    with FakeGoogle("my-project") as google:
        google.bind("project", "roles/aiplatform.user", "serviceAccount:someone@...")
        google.run("gcloud storage buckets add-iam-policy-binding gs://bucket --member=... --role=...")

A request without a valid token is 401, an unknown path 501, an unknown resource 404, what the caller may not do 403, an
API that is not enabled 403 with SERVICE_DISABLED, and a permission that the kind of resource does not have, or one with
a wildcard, 400. Secret Manager answers for an unknown secret as for one without permissions, as its reference says. A
person's request is counted against the project that its header names, which the person must be allowed to use; without
the header it is counted against gcloud's own. Lists of zones come in pages, and zones that are down are named, not
listed. Errors of the registry have the OCI distribution specification's form, and it redirects to blobs.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from tests.fakes import google_commands
from vlmpipe.rehearsal.http_server import ApiError, Handler, LocalServer

# From Google's index of roles and permissions, read in November 2026: of each role what these tests meet.
ROLES: dict[str, set[str]] = {
    "roles/aiplatform.user": {
        "aiplatform.pipelineJobs.create", "aiplatform.pipelineJobs.get", "aiplatform.pipelineJobs.cancel",
        "aiplatform.schedules.create", "aiplatform.customJobs.create", "aiplatform.customJobs.cancel",
        "aiplatform.models.upload", "aiplatform.tensorboardExperiments.create",
    },
    "roles/run.developer": {
        "run.services.create", "run.services.get", "run.services.update", "run.services.delete",
        "run.services.getIamPolicy",
    },
    "roles/run.invoker": {"run.routes.invoke"},
    "roles/logging.viewer": {"logging.logEntries.list"},
    "roles/logging.logWriter": {"logging.logEntries.create"},
    "roles/serviceusage.serviceUsageConsumer": {"serviceusage.services.use", "serviceusage.quotas.get"},
    "roles/serviceusage.serviceUsageViewer": {
        "serviceusage.services.get", "serviceusage.quotas.get", "monitoring.timeSeries.list",
    },
    "roles/storage.legacyBucketReader": {"storage.buckets.get", "storage.objects.list"},
    "roles/storage.objectViewer": {"storage.objects.get", "storage.objects.list"},
    "roles/storage.objectCreator": {"storage.objects.create"},
    "roles/storage.objectUser": {
        "storage.objects.get", "storage.objects.list", "storage.objects.create", "storage.objects.delete",
    },
    "roles/secretmanager.secretAccessor": {"secretmanager.versions.access"},
    "roles/bigquery.dataViewer": {"bigquery.tables.get", "bigquery.tables.getData"},
    "roles/iam.serviceAccountUser": {"iam.serviceAccounts.actAs"},
    "roles/iam.serviceAccountTokenCreator": {"iam.serviceAccounts.getAccessToken"},
    "roles/artifactregistry.reader": {"artifactregistry.repositories.downloadArtifacts"},
    "roles/compute.viewer": {"compute.machineTypes.list", "compute.acceleratorTypes.list"},
    "roles/iam.securityReviewer": {"resourcemanager.projects.getIamPolicy", "storage.buckets.getIamPolicy"},
}  # fmt: skip
MAX_TOKEN_S, MAX_SERVICES, ZONES_A_PAGE = 3600, 30, 2
POLICY_VERSIONS = ("0", "1", "3")
PREFIXES = {"b": "storage.", "secrets": "secretmanager.", "tables": "bigquery.", "serviceAccounts": "iam."}
INDEX = "application/vnd.oci.image.index.v1+json"


def kind_of(email: str) -> str:
    return "serviceAccount" if email.endswith("gserviceaccount.com") else "user"


class FakeGoogle(LocalServer):
    """One project with everything that `vlmpipe doctor` looks at, in memory."""

    def __init__(self, project: str) -> None:
        super().__init__(_Handler)
        self.project = project
        self.enabled: set[str] = set()
        self.buckets: set[str] = set()
        self.secrets: set[str] = set()  # resource names
        self.tables: set[str] = set()
        self.accounts: set[str] = set()
        self.policies: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.limits: dict[tuple[str, str], int] = {}  # by metric and region; "" is every other region
        self.used: dict[tuple[str, str], int] = {}
        self.images: dict[str, list[str]] = {}  # architectures by HOST/NAME@DIGEST or HOST/NAME:TAG
        self.form: Literal["index", "manifest"] = "index"
        self.library_path = ""  # LD_LIBRARY_PATH of every image
        self.zones: dict[str, list[str]] = {}  # by machine type
        self.gpu_zones: dict[str, list[str]] = {}  # by accelerator type
        self.conditional: dict[str, list[tuple[str, str, str]]] = defaultdict(list)  # role, member, title by resource
        self.charged: list[str] = []  # projects that were set for a person's requests
        self.down: set[str] = set()  # zones
        self.repositories: set[str] = {"vlmpipe", "images"}  # of images
        self.silent: set[str] = set()  # services that close the connection

    def bind(self, resource: str, role: str, member: str) -> None:
        """Grant a role. A resource is `project`, a bucket as gs://NAME, an e-mail, or a full name."""
        if role not in ROLES:
            raise ApiError(400, f"Role {role} is not supported for this resource.")
        self.policies[resource][role].add(member)

    def bind_with_condition(self, resource: str, role: str, member: str, title: str) -> None:
        """Grant a role under a condition on names of objects, which no testIamPermissions on the resource meets."""
        self.conditional[resource].append((role, member, title))

    def policy(self, resource: str, version: str) -> dict[str, Any]:
        """The policy, whose conditions are seen in version 3 only; without conditions it is of version 1."""
        if version not in POLICY_VERSIONS:
            raise ApiError(400, f"Invalid policy version {version}: valid are 0, 1 and 3.")
        bindings: list[dict[str, Any]] = [
            {"role": role, "members": sorted(members)} for role, members in self.policies[resource].items()
        ]
        for role, member, title in self.conditional[resource]:
            if version == "3":
                condition = {"title": title, "expression": 'resource.name.startsWith("a")'}
                bindings.append({"role": role, "members": [member], "condition": condition})
            else:
                bindings.append({"role": f"{role}_withcond_0123456789abcdef", "members": [member]})
        is_conditional = version == "3" and bool(self.conditional[resource])
        return {"version": 3 if is_conditional else 1, "bindings": bindings}

    def may(self, email: str, permission: str, resource: str) -> bool:
        return any(
            permission in ROLES[role] and f"{kind_of(email)}:{email}" in members
            for policy in (self.policies[resource], self.policies["project"])
            for role, members in policy.items()
        )

    def credentials(self, email: str, private_key: str) -> dict[str, str]:
        """Content of a service account's key file, whose tokens this server gives."""
        return {
            "type": "service_account", "client_email": email, "private_key": private_key, "private_key_id": "1",
            "token_uri": f"{self.endpoint}/token/{email}", "project_id": self.project,
        }  # fmt: skip

    def run(self, commands: str) -> None:
        """Carry out what a remedy prints, a command a line. Raises AssertionError for one that the tool refuses."""
        for command in commands.splitlines():
            google_commands.run(self, command)


class _Handler(Handler):
    fake: FakeGoogle

    def respond(self, body: bytes) -> None:
        url = urlsplit(self.path)
        _, service, path = url.path.split("/", 2)
        if service in self.fake.silent:
            self.close_connection = True
            self.connection.close()
            return
        query = parse_qs(url.query)
        try:
            content = self._answer(service, f"/{path}", query, json.loads(body) if self._has_json() else {})
            self._send(200, content)
        except ApiError as error:
            if error.code == 302:
                self.send(302, {**error.headers, "Content-Length": "0"})
                return
            if service == "images":
                self._send(error.code, {"errors": [{"code": error.reason, "message": error.message}]})
                return
            details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": error.reason}]
            inner = {"code": error.code, "message": error.message, "details": details if error.reason else []}
            self._send(error.code, {"error": inner})

    def _has_json(self) -> bool:
        return "json" in self.headers.get("Content-Type", "")

    def _send(self, code: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send(code, {"Content-Type": "application/json", "Content-Length": str(len(data))})
        self.wfile.write(data)

    def _answer(self, service: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> dict[str, Any]:
        if service == "token" and self.command == "POST":
            return {"access_token": f"token-of-{path[1:]}", "expires_in": 3600, "token_type": "Bearer"}
        token = re.fullmatch(r"Bearer token-of-(\S+)", self.headers.get("Authorization", ""))
        if not token:
            raise ApiError(401, "Request had invalid authentication credentials.")
        caller = token[1]
        if kind_of(caller) == "user" and service != "images":
            self._require_quota_project(caller, service)
        if service not in ("serviceusage", "images") and f"{service}.googleapis.com" not in self.fake.enabled:
            message = f"{service}.googleapis.com has not been used in project {self.fake.project} before."
            raise ApiError(403, message, reason="SERVICE_DISABLED")
        method = getattr(self, f"_{service}", None)
        found = method and method(caller, path, query, body)
        if found is None:
            raise ApiError(501, f"no such route in this fake: {self.command} {service}{path}")
        content: dict[str, Any] = found
        return content

    def _require_quota_project(self, caller: str, service: str) -> None:
        used = self.headers.get("X-Goog-User-Project", "")
        if not used:
            message = (
                f"Your application is authenticating by using local Application Default Credentials. The {service}"
                ".googleapis.com API requires a quota project, which is not set by default."
            )
            raise ApiError(403, message, reason="SERVICE_DISABLED")
        if used != self.fake.project:
            message = f"{service}.googleapis.com has not been used in project {used} before or it is disabled."
            raise ApiError(403, message, reason="SERVICE_DISABLED")
        if not self.fake.may(caller, "serviceusage.services.use", "project"):
            message = f"Caller does not have required permission to use project {used}."
            raise ApiError(403, message, reason="USER_PROJECT_DENIED")

    def _require(self, caller: str, permission: str, resource: str = "project") -> None:
        if not self.fake.may(caller, permission, resource):
            raise ApiError(403, f"Permission '{permission}' denied on resource '{resource}' (or it may not exist).")

    def _test(self, caller: str, resource: str, asked: list[str], prefix: str) -> dict[str, Any]:
        """testIamPermissions: itself it needs no permission."""
        if not asked:
            raise ApiError(400, "permissions: must not be empty")
        if wrong := [one for one in asked if "*" in one]:
            raise ApiError(400, f"Permission {wrong[0]} has a wildcard, which is not allowed.")
        if wrong := [one for one in asked if prefix and not one.startswith(prefix)]:
            raise ApiError(400, f"Permission {wrong[0]} is not valid for this resource.")
        has = [one for one in asked if self.fake.may(caller, one, resource)]
        return {"permissions": has} if has else {}

    def _iamcredentials(self, caller: str, path: str, _query: Any, body: dict[str, Any]) -> dict[str, Any] | None:
        match = re.fullmatch(r"/v1/projects/-/serviceAccounts/([^/:]+):generateAccessToken", path)
        if not match or self.command != "POST":
            return None
        if match[1] not in self.fake.accounts:
            raise ApiError(404, "Not found; Gaia id not found for email")
        self._require(caller, "iam.serviceAccounts.getAccessToken", match[1])
        if not body.get("scope") or not re.fullmatch(r"\d+s", body.get("lifetime", "")):
            raise ApiError(400, "Invalid scope or lifetime.")
        if not 0 < int(body["lifetime"].removesuffix("s")) <= MAX_TOKEN_S:
            raise ApiError(400, f"Invalid lifetime: at most {MAX_TOKEN_S}s.")
        return {"accessToken": f"token-of-{match[1]}", "expireTime": "2099-01-01T00:00:00Z"}

    def _iam(self, caller: str, path: str, _query: Any, body: dict[str, Any]) -> dict[str, Any] | None:
        match = re.fullmatch(r"/v1/projects/-/serviceAccounts/([^/:]+):testIamPermissions", path)
        if not match or self.command != "POST":
            return None
        if match[1] not in self.fake.accounts:
            raise ApiError(404, "Unknown service account")
        return self._test(caller, match[1], body.get("permissions", []), PREFIXES["serviceAccounts"])

    def _cloudresourcemanager(self, caller: str, path: str, _query: Any, body: dict[str, Any]) -> dict[str, Any] | None:
        match = re.fullmatch(r"/v1/projects/([^/:]+):(testIamPermissions|getIamPolicy)", path)
        if not match or self.command != "POST":
            return None
        if match[1] != self.fake.project:
            raise ApiError(403, "The caller does not have permission")
        if match[2] == "getIamPolicy":
            self._require(caller, "resourcemanager.projects.getIamPolicy")
            return self.fake.policy("project", str(body.get("options", {}).get("requestedPolicyVersion", 0)))
        return self._test(caller, "project", body.get("permissions", []), "")

    def _secretmanager(self, caller: str, path: str, _query: Any, body: dict[str, Any]) -> dict[str, Any] | None:
        match = re.fullmatch(r"/v1/(projects/[^/]+/secrets/[^/:]+):testIamPermissions", path)
        if not match or self.command != "POST":
            return None
        permissions = self._test(caller, match[1], body.get("permissions", []), PREFIXES["secrets"])
        return permissions if match[1] in self.fake.secrets else {}

    def _bigquery(self, caller: str, path: str, _query: Any, body: dict[str, Any]) -> dict[str, Any] | None:
        match = re.fullmatch(r"/bigquery/v2/projects/([^/]+)/datasets/([^/]+)/tables/([^/:]+):testIamPermissions", path)
        if not match or self.command != "POST":
            return None
        if not re.fullmatch(r"[\w -]{1,1024}", unquote(match[3])):
            raise ApiError(400, f"Invalid table ID {match[3]!r}: a policy is a whole table's")
        table = ".".join(map(unquote, match.groups()))
        if table not in self.fake.tables:
            raise ApiError(404, f"Not found: Table {table}")
        return self._test(caller, table, body.get("permissions", []), PREFIXES["tables"])

    def _storage(self, caller: str, path: str, query: dict[str, list[str]], _body: Any) -> dict[str, Any] | None:
        match = re.fullmatch(r"/storage/v1/b/([^/]+)/iam(/testPermissions)?", path)
        if not match or self.command != "GET":
            return None
        if match[1] not in self.fake.buckets:
            raise ApiError(404, "The specified bucket does not exist.")
        if not match[2]:
            self._require(caller, "storage.buckets.getIamPolicy", f"gs://{match[1]}")
            return self.fake.policy(f"gs://{match[1]}", query.get("optionsRequestedPolicyVersion", ["1"])[0])
        return self._test(caller, f"gs://{match[1]}", query.get("permissions", []), PREFIXES["b"])

    def _serviceusage(self, caller: str, path: str, query: dict[str, list[str]], _body: Any) -> dict[str, Any] | None:
        parent = f"projects/{self.fake.project}"
        if path == f"/v1/{parent}/services:batchGet" and self.command == "GET":
            self._require(caller, "serviceusage.services.get")
            names = query.get("names", [])
            if not 1 <= len(names) <= MAX_SERVICES or any(not name.startswith(f"{parent}/services/") for name in names):
                raise ApiError(400, f"names: 1 to {MAX_SERVICES} services of the parent")
            services = [name.rpartition("/")[2] for name in names]
            states = {name: "ENABLED" if name in self.fake.enabled else "DISABLED" for name in services}
            return {"services": [{"name": f"projects/1/services/{one}", "state": states[one]} for one in services]}
        match = re.fullmatch(rf"/v1beta1/{parent}/services/([^/]+)/consumerQuotaMetrics/([^/]+)", path)
        if not match or self.command != "GET":
            return None
        self._require(caller, "serviceusage.quotas.get")
        metric = unquote(match[2])
        limits = {region: limit for (name, region), limit in self.fake.limits.items() if name == metric}
        if not metric.startswith(f"{match[1]}/") or not limits:
            raise ApiError(404, f"Quota metric {metric} not found.")
        buckets = [
            {"defaultLimit": "0", **({"effectiveLimit": str(limit)} if limit else {}),
             **({"dimensions": {"region": region}} if region else {})}
            for region, limit in limits.items()
        ]  # fmt: skip
        by_region = {"unit": "1/{project}/{region}", "quotaBuckets": buckets}
        per_minute = {"unit": "1/min/{project}", "quotaBuckets": [{"effectiveLimit": "60"}]}
        return {"metric": metric, "consumerQuotaLimits": [per_minute, by_region]}

    def _monitoring(self, caller: str, path: str, query: dict[str, list[str]], _body: Any) -> dict[str, Any] | None:
        if path != f"/v3/projects/{self.fake.project}/timeSeries" or self.command != "GET":
            return None
        self._require(caller, "monitoring.timeSeries.list")
        (asked,) = query["filter"]
        match = re.fullmatch(
            r'metric\.type="serviceruntime\.googleapis\.com/quota/allocation/usage" '
            r'AND resource\.type="consumer_quota" '
            r'AND metric\.labels\.quota_metric="([^"]+)" AND resource\.labels\.location="([^"]+)"',
            asked,
        )
        start, end = query["interval.startTime"][0], query["interval.endTime"][0]
        if not match or not start < end:
            raise ApiError(400, "filter or interval cannot be read")
        used = self.fake.used.get((match[1], match[2]))
        points = [{"value": {"int64Value": str(value)}} for value in (used, 0)]  # newest first
        return {} if used is None else {"timeSeries": [{"points": points}]}

    def _compute(self, caller: str, path: str, query: dict[str, list[str]], _body: Any) -> dict[str, Any] | None:
        parent = f"/compute/v1/projects/{self.fake.project}/aggregated/"
        known = {"machineTypes": self.fake.zones, "acceleratorTypes": self.fake.gpu_zones}
        if (kind := path.removeprefix(parent)) not in known or self.command != "GET":
            return None
        self._require(caller, f"compute.{kind}.list")
        match = re.fullmatch(r'name = "([a-z0-9-]+)"', query["filter"][0])
        if not match:
            raise ApiError(400, "Invalid list filter expression.")
        if self.fake.down and query.get("returnPartialSuccess") != ["true"]:
            raise ApiError(503, "Some zones cannot be reached.")
        there = [zone for zone in known[kind].get(match[1], ()) if zone not in self.fake.down]
        start = int(query.get("pageToken", ["0"])[0])
        page = {f"zones/{zone}": {kind: [{"name": match[1]}]} for zone in there[start : start + ZONES_A_PAGE]}
        following = {"nextPageToken": str(start + ZONES_A_PAGE)} if len(there) > start + ZONES_A_PAGE else {}
        down = {"unreachables": [f"zones/{zone}" for zone in sorted(self.fake.down)]} if self.fake.down else {}
        return {"items": {"zones/nowhere1-a": {"warning": {"code": "NO_RESULTS_ON_PAGE"}}, **page}, **following, **down}

    def _images(self, caller: str, path: str, _query: Any, _body: Any) -> dict[str, Any] | None:
        match = re.fullmatch(r"/([^/]+)/(?:v2|downloads)/(([^/]+)/([^/]+)/.+)/(manifests|blobs)/([^/]+)", path)
        if not match or self.command != "GET":
            return None
        host, name, _, repository, kind, reference = match.groups()
        if repository not in self.fake.repositories:
            raise ApiError(404, f'Repository "{repository}" not found', reason="NAME_UNKNOWN")
        permission = "artifactregistry.repositories.downloadArtifacts"
        if not self.fake.may(caller, permission, repository):
            message = f"Permission '{permission}' denied on resource '{repository}' (or it may not exist)."
            raise ApiError(403, message, reason="DENIED")
        if kind == "blobs" and "/v2/" in path:
            raise ApiError(302, "", headers={"Location": self.path.replace("/v2/", "/downloads/", 1)})
        if kind == "blobs":
            own = [f"LD_LIBRARY_PATH={self.fake.library_path}"] if self.fake.library_path else None
            return {"architecture": reference.partition(":")[2], "os": "linux", "config": {"Env": own}}
        if reference.startswith("sha256:of-"):
            return {"schemaVersion": 2, "config": {"digest": f"sha256:{reference.removeprefix('sha256:of-')}"}}
        joined = f"{host}/{name}@{reference}" if ":" in reference else f"{host}/{name}:{reference}"
        if joined not in self.fake.images:
            raise ApiError(404, f'Failed to fetch "{reference}"', reason="MANIFEST_UNKNOWN")
        if INDEX not in self.headers.get("Accept", ""):
            message = "the image is an index, which the client does not accept"
            raise ApiError(404, message, reason="MANIFEST_UNKNOWN")
        architectures = self.fake.images[joined]
        if self.fake.form == "manifest":
            return {"schemaVersion": 2, "config": {"digest": f"sha256:{architectures[0]}"}}
        platforms = [
            {"digest": f"sha256:of-{one}", "platform": {"architecture": one, "os": "linux"}} for one in architectures
        ]
        return {"manifests": [*platforms, {"platform": {"architecture": "unknown", "os": "unknown"}}]}
