"""Every stand-in for a service that refuses anything has a test that it does, by status and reason."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.paths import ROOT

HERE = "tests/integration/fakes"
RUNS = f"{HERE}/test_vertex.py::test_a_request_with_one_fault_is_refused_and_makes_nothing"
# By module: the test that sends it bad requests. A new stand-in without a row, or a row without its test, fails here.
STAND_INS = {
    "tests/fakes/bigquery.py": f"{HERE}/test_bigquery.py::test_a_request_with_one_fault_is_refused",
    "tests/fakes/chat_model.py": f"{HERE}/test_small_servers.py::test_a_question_with_one_fault_is_refused",
    "tests/fakes/cloud_run/server.py": (
        f"{HERE}/test_cloud_run_rules.py::test_traffic_and_revisions_are_checked_by_the_server"
    ),
    "tests/fakes/gcs/accounts.py": (
        "tests/e2e/test_accounts.py::test_without_the_jobs_grant_on_the_data_bucket_the_evaluation_is_refused"
    ),
    "tests/fakes/gcs/server.py": f"{HERE}/test_gcs.py::test_what_the_fake_does_not_know_is_501",
    "tests/fakes/google_apis.py": f"{HERE}/test_google_apis.py::test_a_request_with_one_fault_is_refused",
    "tests/fakes/hub.py": f"{HERE}/test_hub.py::test_a_file_that_may_not_be_read_is_refused_as_the_client_knows_it",
    "tests/fakes/hub_uploads.py": f"{HERE}/test_hub.py::test_an_upload_with_one_fault_is_refused_and_changes_nothing",
    "tests/fakes/kubeflow_pipelines.py": (
        f"{HERE}/test_kubeflow_pipelines.py::test_a_request_with_one_fault_is_refused_and_makes_nothing"
    ),
    "tests/fakes/kubernetes/api.py": f"{HERE}/test_kubernetes.py::test_missing_and_unknown_values_are_not_guessed",
    "tests/fakes/kubernetes/inference_services.py": (
        f"{HERE}/test_kubernetes.py::test_a_service_with_one_fault_is_refused_and_not_made"
    ),
    "tests/fakes/kubernetes/pod_rules.py": (
        f"{HERE}/test_kubernetes.py::test_a_job_whose_pods_would_never_be_made_is_refused"
    ),
    "tests/fakes/kubernetes/train_job_rules.py": (
        f"{HERE}/test_kubernetes.py::test_a_job_that_the_api_refuses_is_refused"
    ),
    "tests/fakes/receiver.py": f"{HERE}/test_small_servers.py::test_secret_manager_gives_a_version_to_who_may_read_it",
    "tests/fakes/vertex/custom_jobs.py": f"{HERE}/test_vertex_rules.py::test_a_job_with_one_fault_is_refused",
    "tests/fakes/vertex/endpoints.py": (
        "tests/integration/vlmpipe/platforms/test_vertex_endpoint.py::"
        "test_the_fake_refuses_deployments_that_the_api_refuses"
    ),
    "tests/fakes/vertex/grpc.py": f"{HERE}/test_vertex_grpc.py::test_grpc_refuses_the_same_requests_as_rest",
    "tests/fakes/vertex/metadata.py": (
        "tests/integration/components/test_vertex_experiments.py::test_the_server_refuses_what_the_service_would"
    ),
    "tests/fakes/vertex/models.py": f"{HERE}/test_vertex_models.py::test_an_upload_with_one_fault_is_refused",
    "tests/fakes/vertex/server.py": f"{HERE}/test_vertex.py::test_the_log_takes_one_filter",
    "tests/fakes/vertex/templates.py": "tests/integration/pipelines/test_templates.py::test_the_server_is_strict",
    "tests/fakes/vertex/tuning_jobs.py": f"{HERE}/test_vertex_rules.py::test_a_job_with_one_fault_is_refused",
    "vlmpipe/rehearsal/gcs_server.py": f"{HERE}/test_gcs.py::test_a_chunk_with_a_gap_is_refused",
    "vlmpipe/rehearsal/vertex/custom_jobs.py": f"{HERE}/test_vertex_rules.py::test_a_job_with_one_fault_is_refused",
    "vlmpipe/rehearsal/vertex/messages.py": RUNS,
    "vlmpipe/rehearsal/vertex/rules.py": f"{HERE}/test_vertex_rules.py::test_a_job_with_one_fault_is_refused",
    "vlmpipe/rehearsal/vertex/schedules.py": (
        f"{HERE}/test_vertex.py::test_a_schedule_with_one_fault_is_refused_and_makes_nothing"
    ),
    "vlmpipe/rehearsal/vertex/scripted_runs.py": (
        f"{HERE}/test_vertex.py::test_cancelling_is_asked_for_once_and_takes_a_while"
    ),
    "vlmpipe/rehearsal/vertex/server.py": RUNS,
}
# Of several stand-ins: what is refused is theirs.
SHARED = {"vlmpipe/rehearsal/http_server.py", "vlmpipe/rehearsal/serve.py"}
FOLDERS = ("tests/fakes", "vlmpipe/rehearsal")
REFUSES = re.compile(
    r"raise (ApiError|Refused)\(|BaseHTTPRequestHandler|def (\w+_)?(violations|denials)\(|context\.abort"
)


def found() -> set[str]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {str(path.relative_to(ROOT)) for path in files if REFUSES.search(path.read_text(encoding="utf-8"))}


def test_every_module_that_refuses_is_in_the_table() -> None:
    assert found() - SHARED == STAND_INS.keys()


@pytest.mark.parametrize("module", STAND_INS)
def test_the_test_of_a_stand_in_is_there(module: str) -> None:
    file, _, name = STAND_INS[module].partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
