"""Nodes of a job meet: real sockets, and at the end real launchers with torchrun."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.support.paths import ROOT
from vlmpipe.trainer.distributed.cluster_env import Cluster
from vlmpipe.trainer.distributed.rendezvous import TIMEOUT_VARIABLE, meet, rendezvous_timeout_s
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError

pytestmark = pytest.mark.timeout(90)

PATIENCE_S = 30.0
Outcome = UserError | None


@pytest.fixture
def cluster() -> Cluster:
    """A job of three nodes on this machine, seen by its chief."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Cluster((f"localhost:{port}", "host-b:2222", "host-c:2222"), node_rank=0)


class Node:
    """One node that meets the others in a thread of its own."""

    def __init__(self, cluster: Cluster, rank: int, timeout_s: float = PATIENCE_S, report_s: float = 30.0) -> None:
        self._outcome: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._arguments = (replace(cluster, node_rank=rank), timeout_s, report_s)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        node, timeout_s, report_s = self._arguments
        try:
            meet(node, timeout_s=timeout_s, report_s=report_s)
        except UserError as error:
            return self._outcome.put(error)
        self._outcome.put(None)

    def outcome(self) -> Outcome:
        return self._outcome.get(timeout=PATIENCE_S)


def wait_for_line(capfd: pytest.CaptureFixture[str], wanted: str) -> str:
    """What was printed until `wanted` appeared."""
    seen, ticks = "", threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        seen += capfd.readouterr().out
        if wanted in seen:
            return seen
        ticks.wait(0.02)
    raise AssertionError(f"{wanted!r} was not printed, but {seen!r}")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_nodes_meet_in_whatever_order_they_come(cluster: Cluster, order: tuple[int, ...]) -> None:
    nodes = [Node(cluster, rank) for rank in order]
    assert [node.outcome() for node in nodes] == [None, None, None]
    with socket.create_server(("", cluster.master_port)):
        pass  # torchrun finds the port free the moment everybody is told to go


def test_missing_nodes_are_reported_and_may_come_late(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    nodes = [Node(cluster, 0, report_s=0.1), Node(cluster, 1, report_s=0.1)]
    sentence = "launcher: waiting for workerpool1-1 (host-c), 2 of 3 nodes are here\n"
    assert sentence in wait_for_line(capfd, 2 * sentence), "the chief says it, and tells the nodes that wait"
    nodes.append(Node(cluster, 2))
    assert [node.outcome() for node in nodes] == [None, None, None]


def test_node_reports_that_it_waits_for_the_chief(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    nodes = [Node(cluster, 1, report_s=0.1)]
    wait_for_line(capfd, "launcher: waiting for workerpool0-0 (localhost): ")
    nodes += [Node(cluster, 0), Node(cluster, 2)]
    assert [node.outcome() for node in nodes] == [None, None, None]


def test_the_error_names_the_missing_node_on_every_node_that_is_here(cluster: Cluster) -> None:
    nodes = [Node(cluster, 0, timeout_s=1.0), Node(cluster, 2)]
    errors = [node.outcome() for node in nodes]
    for error in errors:
        assert error and error.code == ExitCode.UNAVAILABLE
        assert error.found == "workerpool1-0 (host-b) did not come within 1 s: 2 of 3 nodes are here"


def test_missing_chief_is_named(cluster: Cluster) -> None:
    error = Node(cluster, 1, timeout_s=0.3).outcome()
    assert error and error.code == ExitCode.UNAVAILABLE
    assert f"workerpool0-0 (localhost), did not answer on port {cluster.master_port}" in error.found


def test_unknown_host_name_is_awaited(cluster: Cluster) -> None:
    nowhere = Cluster(("no-such-host.invalid:2222", *cluster.hosts[1:]), node_rank=0)
    error = Node(nowhere, 1, timeout_s=0.3).outcome()
    assert error and "workerpool0-0 (no-such-host.invalid)" in error.found


def test_a_node_that_dies_while_waiting_is_missing_again(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    nodes = [Node(cluster, 0, report_s=0.1)]
    with connect(cluster) as dying:
        dying.sendall(b'{"node": 1, "nodes": 3}\n')
        wait_for_line(capfd, "waiting for workerpool1-1 (host-c), 2 of 3")
    wait_for_line(capfd, "waiting for workerpool1-0 (host-b), workerpool1-1 (host-c), 1 of 3")
    nodes += [Node(cluster, 1), Node(cluster, 2)]
    assert [node.outcome() for node in nodes] == [None, None, None]


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\xce\xf7\x85\x3c\n", b"[1]\n", b"x" * 9000])
def test_foreign_connections_are_closed(cluster: Cluster, junk: bytes) -> None:
    chief = Node(cluster, 0)
    with connect(cluster) as stranger:
        stranger.sendall(junk)
        stranger.settimeout(PATIENCE_S)
        assert hangs_up(stranger)
    nodes = [chief, Node(cluster, 1), Node(cluster, 2)]
    assert [node.outcome() for node in nodes] == [None, None, None]


def test_node_of_another_job_is_refused_with_a_reason(cluster: Cluster) -> None:
    chief = Node(cluster, 0)
    other = replace(cluster, hosts=(*cluster.hosts, "host-d:2222"))
    error = Node(other, 3).outcome()
    assert error and error.found == "the chief knows of 3 nodes, node 3 of 4"
    assert [node.outcome() for node in (Node(cluster, 1), Node(cluster, 2), chief)] == [None, None, None]


def test_a_restarted_node_waits_until_the_torchrun_of_the_old_job_is_gone(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    old = dist.TCPStore("localhost", cluster.master_port, 2, is_master=True, wait_for_workers=False)
    nodes = [Node(cluster, 1, report_s=0.1)]
    wait_for_line(capfd, "launcher: waiting for workerpool0-0 (localhost): ")
    del old
    nodes += [Node(cluster, 0), Node(cluster, 2)]
    assert [node.outcome() for node in nodes] == [None, None, None]


def test_port_in_use_is_reported(cluster: Cluster) -> None:
    with socket.create_server(("", cluster.master_port)):
        error = Node(cluster, 0).outcome()
    assert error and error.code == ExitCode.UNAVAILABLE
    assert error.found.startswith(f"port in use while waiting for the other nodes on port {cluster.master_port}")


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "1.5"])
def test_the_timeout_must_be_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    with pytest.raises(ConfigError, match=TIMEOUT_VARIABLE):
        rendezvous_timeout_s()


def connect(cluster: Cluster) -> socket.socket:
    """A connection to the chief, which may not be listening yet."""
    ticks = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        try:
            return socket.create_connection(("localhost", cluster.master_port))
        except ConnectionRefusedError:
            ticks.wait(0.02)
    raise AssertionError("the chief does not listen")


def hangs_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # it left with bytes unread
        return True


Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def launch(cluster: Cluster) -> Iterator[Launch]:
    started: list[subprocess.Popen[str]] = []
    _, port = cluster.hosts[0].split(":")
    pools = {"workerpool0": [f"localhost:{port}"], "workerpool1": ["localhost:1"]}

    def start(pool: str, **environment: str) -> subprocess.Popen[str]:
        spec = {"cluster": pools, "task": {"type": pool, "index": 0}}
        if not pool:  # on Kubeflow
            environment |= {"CLUSTER_SPEC": "", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port}
        started.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "vlmpipe.trainer.launch",
                    "--nproc-per-node",
                    "1",
                    "--",
                    "tests.support.drivers.sum_of_ranks",
                ],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CLUSTER_SPEC": json.dumps(spec), **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow  # tests/e2e/test_quickstart.py trains on two nodes, a launcher each
def test_launchers_meet_and_torchrun_takes_over_the_port(launch: Launch) -> None:
    late = launch("workerpool1")
    chief = launch("workerpool0")
    said = [process.communicate(timeout=60)[0] for process in (chief, late)]
    assert (chief.returncode, late.returncode) == (0, 0), said
    assert "sum of ranks: 1" in said[0]


@pytest.mark.slow  # how a cluster is read from them: tests/unit/trainer/distributed/test_cluster_env.py
def test_launchers_meet_by_the_variables_of_kubeflow(launch: Launch) -> None:
    nodes = [launch("", PET_NNODES="2", PET_NPROC_PER_NODE="auto", PET_NODE_RANK=rank) for rank in "01"]
    said = [process.communicate(timeout=60)[0] for process in nodes]
    assert [process.returncode for process in nodes] == [0, 0], said
    assert "sum of ranks: 1" in said[0]


def test_launcher_without_its_peer_ends_with_69(launch: Launch) -> None:
    chief = launch("workerpool0", **{TIMEOUT_VARIABLE: "1"})
    said, _ = chief.communicate(timeout=60)
    assert chief.returncode == ExitCode.UNAVAILABLE
    assert "error: workerpool1-0 (localhost) did not come within 1 s: 1 of 2 nodes are here\n" in said
