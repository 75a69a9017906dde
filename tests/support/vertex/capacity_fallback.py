"""Jobs of a run with cluster.capacity_fallback, tried option by option on the strict local server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from google.api_core.retry import Retry

from tests.fakes.gcs.server import FakeGcs
from tests.fakes.vertex.server import FakeVertex
from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.google_cloud import retries
from vlmpipe.google_cloud.client import ENDPOINT_VARIABLE, translate_errors
from vlmpipe.job_spec.build import Job, job_order
from vlmpipe.platforms.vertex.jobs.capacity_fallback import CapacityFallback
from vlmpipe.rehearsal.vertex.custom_jobs import Step
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.storage import Storage, open_storage

SPOT_FILE = ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml"
FALLBACK = (
    "cluster.capacity_fallback=[{scheduling_strategy: spot, wait: 600s}, {scheduling_strategy: "
    "flex_start, wait: 1200s}, {scheduling_strategy: standard, wait: 0s}]"
)
SETTINGS = [
    FALLBACK, "cluster.reduction_server=null", "plan.samples=100000", "plan.sample_tokens=700",
    "gcp.project=test-project", "gcp.location=us-central1",
]  # fmt: skip
RESERVATION = "projects/test-project/zones/us-central1-a/reservations/mine"
RESERVED = (
    "cluster.reservation_affinity={reservation_affinity_type: specific_reservation, values: [" + RESERVATION + "]}"
)
RUN = RunPaths(run_id="mine", root_uri="gs://team")
WAITS = [Step("QUEUED"), Step("PENDING")]
RUNS = [Step("RUNNING"), Step("RUNNING"), Step("SUCCEEDED")]
STOCKOUT = Step("FAILED", 8, "Resources are insufficient in region: us-central1. Please try a different region.")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    for name in ("RETRY", "PATIENT"):
        monkeypatch.setattr(retries, name, Retry(initial=0.01, maximum=0.05, timeout=5.0))
    with FakeVertex() as running:
        monkeypatch.setenv(ENDPOINT_VARIABLE, running.endpoint)
        yield running


def config(*overrides: str) -> RunConfig:
    own = [one for one in SETTINGS if one.partition("=")[0] not in {given.partition("=")[0] for given in overrides}]
    return load_run_file(SPOT_FILE, [*own, *overrides])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """A run's folder as resolve-run leaves it, with prices that are easy to multiply."""
    terms = {"spot": 36.0, "flex_start": 72.0, "standard": 100.0}
    by_term = {name: {"steps": [{"job": "train", "usd_per_hour": usd}]} for name, usd in terms.items()}
    with FakeGcs(buckets=["team"]) as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
        folder = open_storage("gs://team/runs/mine")
        folder.write("plan.json", json.dumps({"cost": {"by_term": by_term}}).encode())
        folder.write("run.json", json.dumps(config().to_run_json(RUN)).encode())
        yield folder


def climb(server: FakeVertex, run: Storage, wanted: RunConfig | None = None, job: Job = "train") -> str:
    """As the step does, by the server's clock."""
    order, jobs = job_order(wanted or config(), job, run.root_uri), server.custom_jobs
    fallback = CapacityFallback(order, now=lambda: jobs.now, sleep=jobs.sleep)
    with translate_errors(fallback.place, what="custom job"):
        return fallback.run()


def tried(run: Storage) -> list[tuple[str, str]]:
    attempts = json.loads(run.read("capacity_fallback.json"))["attempts"]
    return [(one["strategy"], one["outcome"]) for one in attempts]


def strategies(server: FakeVertex) -> list[str]:
    return [job.job_spec.scheduling.strategy.name for job in server.custom_jobs.jobs.values()]
