"""What the project calls of KFP's and Vertex AI's SDKs is not deprecated: compiling, job specs and the API's clients.

An interpreter of its own, because a warning at import is given once.
"""

from __future__ import annotations

import subprocess
import sys

from tests.support.paths import ROOT

PROGRAM = """
from google.auth.credentials import AnonymousCredentials

from tests.support.pipelines.golden_pipelines import outline
from vlmpipe.google_cloud import client
from vlmpipe.platforms.vertex.jobs import capacity_fallback
from vlmpipe.config.run_config import load_run_file
from vlmpipe.registry import vertex as vertex
from vlmpipe.platforms.vertex import endpoint as vertex_endpoint
from google.cloud.aiplatform_v1.services import (
    endpoint_service, job_service, model_service, pipeline_service, schedule_service
)

outline(load_run_file("configs/llava-7b.yaml"))
for service in (
    endpoint_service.EndpointServiceClient, job_service.JobServiceClient, model_service.ModelServiceClient,
    pipeline_service.PipelineServiceClient, schedule_service.ScheduleServiceClient,
):
    service(credentials=AnonymousCredentials())
"""
KINDS = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")


def run(program: str) -> subprocess.CompletedProcess[str]:
    errors = [option for kind in KINDS for option in ("-W", f"error::{kind}")]
    return subprocess.run([sys.executable, *errors, "-c", program], cwd=ROOT, capture_output=True, text=True)


def test_the_sdks_give_no_warning_of_deprecation() -> None:
    found = run(PROGRAM)
    assert found.returncode == 0, found.stderr


def test_a_deprecated_call_is_an_error() -> None:
    deprecated = "import kfp.dsl, warnings; warnings.warn('dsl.old', FutureWarning, stacklevel=1)"
    assert "FutureWarning: dsl.old" in run(deprecated).stderr
