"""Which refusals of a log mean that there is none, and which are errors."""

from __future__ import annotations

import json

import pytest
from kubernetes.client.exceptions import ApiException

from vlmpipe.platforms.kubeflow.jobs.client import has_no_log


def refusal(status: int, message: str, name: str = "") -> ApiException:
    error = ApiException(status=status, reason="refused")
    error.body = json.dumps({"kind": "Status", "message": message, "details": {"name": name} if name else {}})
    return error


@pytest.mark.parametrize(
    "message",
    [
        'container "node" in pod "a-0" is waiting to start: ContainerCreating',
        'container "node" in pod "a-0" is waiting to start - no logs yet',
        'previous terminated container "node" in pod "a-0" not found',
        'container "node" in pod "a-0" is not available',
        "container main is not valid for pod a-0",
    ],
)
def test_a_container_without_a_log_has_none_yet(message: str) -> None:
    assert has_no_log(refusal(400, message))


@pytest.mark.parametrize(
    "message",
    [
        'sinceTime: Invalid value: "yesterday": must be a time',
        "a container name must be specified for pod a-0, choose one of: [node istio-proxy]",
        "",
    ],
)
def test_any_other_bad_request_is_an_error(message: str) -> None:
    assert not has_no_log(refusal(400, message))


def test_a_missing_pod_is_not_a_missing_path() -> None:
    assert has_no_log(refusal(404, 'pods "a-0" not found', "a-0")) and not has_no_log(refusal(404, "page not found"))
    assert not has_no_log(refusal(403, "is waiting to start"))
