"""A deployment on Cloud Run against the strict local server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from google.api_core.retry import Retry
from google.cloud.run_v2 import types as api

from tests.fakes.cloud_run.server import FakeCloudRun
from tests.support.vertex.endpoints import asked_questions, right
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.google_cloud import retries
from vlmpipe.google_cloud.client import Place
from vlmpipe.platforms.vertex.cloud_run import form, service
from vlmpipe.platforms.vertex.cloud_run.client import ENDPOINT_VARIABLE
from vlmpipe.platforms.vertex.cloud_run.service import CloudRunService
from vlmpipe.serving import waking
from vlmpipe.serving.agreement import measure_agreement, require_agreement

PLACE = Place("test-project", "us-central1", "jobs@test-project.iam.gserviceaccount.com")
IMAGE = f"us-docker.pkg.dev/test-project/serving/vllm@sha256:{'1' * 64}"
MODEL = ["gs://registry/digits/run-1/model/", "--dtype=bfloat16", "--served-model-name=digits"]
RTX = {"accelerator_type": "NVIDIA_RTX_PRO_6000"}


@contextlib.contextmanager
def cloud_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloudRun]:
    """The local server, which answers every question rightly; with short waits."""
    monkeypatch.setattr(retries, "RETRY", Retry(initial=0.01, maximum=0.05, timeout=5.0))
    monkeypatch.setattr(service, "POLLING", service.POLLING.with_delay(initial=0.01))
    monkeypatch.setattr(waking, "WAKING_POLL_S", 0.01)
    monkeypatch.setattr(waking, "WAKING_S", 60.0)
    with FakeCloudRun() as running:
        monkeypatch.setenv(ENDPOINT_VARIABLE, running.endpoint)
        running.answers = dict.fromkeys(range(1, 9), right)
        yield running


def deploy_of(**changes: Any) -> DeployConfig:
    usual = {"endpoint": "digits", "image_uri": IMAGE, "cloud_run": {}, "canary_percent": 20}
    return DeployConfig(**{**usual, **changes})


def service_of(**changes: Any) -> CloudRunService:
    return CloudRunService(PLACE, deploy_of(**changes), labels={"team": "vision"}, encryption_key="")


def deployed(run_id: str, **changes: Any) -> dict[str, int]:
    """Deploy as the step does. Returns the split."""
    run, questions = service_of(**changes), asked_questions()
    run.require_usable(questions, "digits")
    with run.canary(MODEL, run_id) as candidate:
        require_agreement(measure_agreement(questions, run.ask(candidate, "digits")), 0.95)
    return run.promote(candidate)


def made(**changes: Any) -> api.Service:
    """The service of our request."""
    template = form.Instance(deploy_of(**changes), PLACE.service_account, "", {"team": "vision"}).template("r", MODEL)
    return api.Service(template=template, scaling=api.ServiceScaling(min_instance_count=1))
