"""A project as Terraform's module makes it, on the stand-in for Google's services, and a run file that uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.google_apis import FakeGoogle
from tests.support.paths import ROOT
from vlmpipe.access.grants import grants_json
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.doctor import google_api
from vlmpipe.doctor.rows import Row

PROJECT, REGION = "my-project", "us-central1"
IMAGE = f"{REGION}-docker.pkg.dev/{PROJECT}/vlmpipe/trainer@sha256:{'1' * 64}"
SECRETS = {"hub": ["model.hub_token_secret"], "chat": ["notify.webhook"], "tracker": ["secrets"]}
BUCKETS = {name: f"{PROJECT}-vlmpipe-{name}" for name in ("data", "runs", "mirror", "build")}
OF_THE_RUN = ("submitter", "pipeline", "trainer")  # accounts that rows are about
QUOTAS = {"custom_model_training_cpus": 100, "custom_model_training_nvidia_l4_gpus": 4}


def account(name: str) -> str:
    return f"vlmpipe-{name}@{PROJECT}.iam.gserviceaccount.com"


def bindings() -> Iterator[tuple[str, str, str]]:
    """Resource, role and account of each grant in grants.json that the run file below needs or doctor asks with."""
    grants: Mapping[str, Any] = json.loads(grants_json())
    for grant in grants["project"].values():
        if grant["when"] not in ("tensorboard", "cloud_run"):
            yield "project", grant["role"], grant["account"]
    for grant in grants["buckets"].values():
        yield f"gs://{BUCKETS[grant['bucket']]}", grant["role"], grant["account"]
    for grant in grants["act_as"].values():
        yield account(grant["as"]), grant["role"], grant["account"]
    for grant in grants["tokens"].values():
        yield account(grant["of"]), "roles/iam.serviceAccountTokenCreator", grant["account"]
    yield "vlmpipe", "roles/artifactregistry.reader", "submitter"
    for secret, fields in SECRETS.items():
        for reader in {reader for field in fields for reader in grants["secrets"][field]}:
            yield f"projects/{PROJECT}/secrets/{secret}", "roles/secretmanager.secretAccessor", reader


def run_file(*overrides: str) -> RunConfig:
    """A run file that names every bucket, three secrets, a benchmark and images."""
    data = f"gs://{BUCKETS['data']}"
    values = [
        f"gcp.project={PROJECT}", f"gcp.location={REGION}", f"gcp.pipeline_root=gs://{BUCKETS['runs']}/vlmpipe",
        f"output.root_uri=gs://{BUCKETS['runs']}/vlmpipe", f"gcp.service_account={account('pipeline')}",
        f"gcp.job_service_account={account('trainer')}", f"gcp.pipeline_image={IMAGE}", f"cluster.image_uri={IMAGE}",
        f"data.source={data}/records.json", f"model.hub_token_secret=projects/{PROJECT}/secrets/hub",
        f"notify.webhook=projects/{PROJECT}/secrets/chat", f"checkpoint.mirror_uri=gs://{BUCKETS['mirror']}/vlmpipe",
        f"secrets={{TOKEN: projects/{PROJECT}/secrets/tracker/versions/1}}",
        f"evaluate.benchmarks=[{{name: pope, format: pope, uri: '{data}/pope.json', images: '{data}/pope'}}]",
    ]  # fmt: skip
    given = dict(one.split("=", 1) for one in (*values, *overrides))
    return load_run_file(ROOT / "configs/digits.yaml", [f"{field}={value}" for field, value in given.items()])


@contextmanager
def project(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[tuple[FakeGoogle, FakeGcs]]:
    """The services with a project in which the run file's run could start, and this machine logged in as submitter."""
    with FakeGoogle(PROJECT) as google, FakeGcs(buckets=list(BUCKETS.values())) as gcs:
        google.buckets = set(BUCKETS.values())
        google.accounts = {account(name) for name in ("submitter", "pipeline", "trainer")}
        google.secrets = {f"projects/{PROJECT}/secrets/{name}" for name in SECRETS}
        google.enabled = {f"{name}.googleapis.com" for name in (*google_api.ADDRESSES, "aiplatform", "logging")}
        google.enabled |= {"artifactregistry.googleapis.com"}
        google.limits = {(f"aiplatform.googleapis.com/{name}", REGION): limit for name, limit in QUOTAS.items()}
        google.images = {IMAGE: ["amd64", "arm64"]}
        google.zones = {"n1-standard-8": [f"{REGION}-a", f"{REGION}-f"], "g2-standard-4": ["europe-west4-a"]}
        google.bind("project", "roles/compute.viewer", f"serviceAccount:{account('submitter')}")
        for resource, role, name in bindings():
            google.bind(resource, role, f"serviceAccount:{account(name)}")
        for name in ("records.json", "pope.json", "pope/1.jpg", "tokenizer/tokenizer.json"):
            gcs.client().bucket(BUCKETS["data"]).blob(name).upload_from_string(b"{}")
        addresses = {name: f"{google.endpoint}/{name}" for name in google_api.ADDRESSES}
        monkeypatch.setattr(google_api, "ADDRESSES", {**addresses, "images": f"{google.endpoint}/images/{{host}}"})
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
        monkeypatch.setattr("vlmpipe.trainer.secret_manager.SECRET_MANAGER", "http://127.0.0.1:1")
        log_in(monkeypatch, folder, google, "submitter")
        yield google, gcs


def log_in(monkeypatch: pytest.MonkeyPatch, folder: Path, google: FakeGoogle, name: str) -> None:
    """Make an account this machine's own."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    file = folder / "login.json"
    file.write_text(json.dumps(google.credentials(account(name), pem)))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))


def not_ok(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.state != "ok"]


def row_of(rows: list[Row], subject: str) -> Row:
    """The only row of the subject that is not ok."""
    (row,) = [row for row in rows if row.subject == subject and row.state != "ok"]
    return row
