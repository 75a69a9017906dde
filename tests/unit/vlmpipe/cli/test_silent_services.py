"""A service that accepts connections and never answers: a person is told so after one request of SOON_S."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support.command_line import Vlmpipe
from tests.support.paths import ROOT
from tests.support.pipelines.example_project import for_vertex
from vlmpipe.config.run_config import load_run_file
from vlmpipe.google_cloud import retries
from vlmpipe.google_cloud.bucket_checks import require_buckets
from vlmpipe.google_cloud.client import ENDPOINT_VARIABLE
from vlmpipe.platforms.kubeflow.runs import client
from vlmpipe.trainer.errors import ExitCode, UserError

DIGITS = str(ROOT / "configs/digits.yaml")
ACCOUNT = "runner@my-project.iam.gserviceaccount.com"
VERTEX = (
    "gcp.project=my-project", "gcp.pipeline_root=gs://my-bucket/vlmpipe", f"gcp.service_account={ACCOUNT}",
)  # fmt: skip
SCHEDULED = (DIGITS, *for_vertex(VERTEX))
JOB = "projects/my-project/locations/us-central1/pipelineJobs/digits-20260101-000000-a3f09c"


class Silent:
    """Accepts connections and keeps them open."""

    def __init__(self, server: socket.socket) -> None:
        self.address = f"http://127.0.0.1:{server.getsockname()[1]}"
        self.connections: list[socket.socket] = []
        self._server = server
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self.connections.append(self._server.accept()[0])
            except OSError:  # closed
                return


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    for module in (retries, client):
        monkeypatch.setattr(module, "SOON_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        running = Silent(server)
        for name in (ENDPOINT_VARIABLE, "STORAGE_EMULATOR_HOST", "KF_PIPELINES_ENDPOINT"):
            monkeypatch.setenv(name, running.address)
        yield running
        for connection in running.connections:
            connection.close()


@pytest.mark.parametrize(
    "command",
    [
        ("schedule", "list", *SCHEDULED),
        ("schedule", "pause", *SCHEDULED),
        ("status", JOB),
        ("diagnose", JOB),
        ("schedule", "list", *SCHEDULED, "--target", "kubeflow"),
        ("schedule", "resume", *SCHEDULED, "--target", "kubeflow"),
        ("status", "http://127.0.0.1/#/runs/details/00000000-0000-0000-0000-000000000000"),
    ],
    ids=lambda command: " ".join(command[:2]) + (" kubeflow" if "kubeflow" in command[-1] else ""),
)
def test_a_command_says_so_after_one_request(silent: Silent, vlmpipe: Vlmpipe, command: tuple[str, ...]) -> None:
    if command[-1].startswith("http"):
        command = (*command[:-1], command[-1].replace("http://127.0.0.1", silent.address))
    answer = vlmpipe(*command)
    assert (answer.code, len(silent.connections)) == (ExitCode.UNAVAILABLE, 1), answer.err
    assert silent.address.removeprefix("http://") in answer.err


def test_buckets_are_asked_for_once(silent: Silent) -> None:
    config = load_run_file(DIGITS, list(VERTEX))
    with pytest.raises(UserError, match="Cloud Storage does not answer: Read timed out") as caught:
        require_buckets(config)
    assert (caught.value.code, len(silent.connections)) == (ExitCode.UNAVAILABLE, 1)


def test_a_request_to_kubeflow_has_a_limit_where_nobody_waits(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    """kfp's client itself waits for ever, also where it is given a number that is not whole."""
    monkeypatch.setattr(client, "REQUEST_TIMEOUT_S", 0.3)
    with pytest.raises(UserError, match="could not reach"):
        client.KubeflowRuns(silent.address)
