"""Check-in of nodes at the chief before torchrun starts, so that a missing node is named.

torchrun's own rendezvous waits in silence and ends with a count. Vertex AI starts each replica when its machine is
ready, minutes apart, so waiting is normal, and waiting in vain must say for whom.

The chief listens on the master port, the only one that is known to be open between replicas (2222 in CLUSTER_SPEC), and
closes it before it lets anybody go on: no torchrun can meet it there, and torchrun finds the port free. A node whose
connection is refused, or answered by something else (the torchrun of a job that is still ending), tries again.

    node -> chief   {"node": 2, "nodes": 4}
    chief -> node   wait <sentence> | go | fail <sentence>      each a line; `wait` is repeated while others are missing
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from trainer.distributed.cluster_env import Cluster
from trainer.errors import ConfigError, ExitCode, UserError, from_os_error

TIMEOUT_VARIABLE = "VLMPIPE_RENDEZVOUS_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 900  # replicas start minutes apart
REPORT_S = 30.0
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 2.0
CONNECT_S = 5.0
GOODBYE_S = 5.0  # for a node to hang up first, which leaves the port to torchrun at once
MAX_LINE_BYTES = 4096
NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)


def rendezvous_timeout_s() -> int:
    """Seconds that nodes wait for each other. Raises ConfigError when the environment variable is not a number."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_S))
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{TIMEOUT_VARIABLE} is {text!r}", expected="seconds, a whole number of at least 1")
    return int(text)


def meet(cluster: Cluster, *, timeout_s: float, report_s: float = REPORT_S) -> None:
    """Return on every node once all are here. Raises UserError (exit 69) that names those who are not."""
    if cluster.num_nodes == 1:
        return
    if cluster.node_rank:
        _check_in(cluster, timeout_s, report_s)
    else:
        _Chief(cluster, report_s).gather(timeout_s)


def node_name(cluster: Cluster, node: int) -> str:
    """A node as Vertex AI's logs call it, with its host; elsewhere its host, which is the name of its pod."""
    host = cluster.hosts[node].rpartition(":")[0]
    if not cluster.in_pools:
        return host
    return f"{'workerpool0-0' if node == 0 else f'workerpool1-{node - 1}'} ({host})"


@dataclass
class _Peer:
    """One connection to the chief: `node` is None until it has said who it is."""

    socket: socket.socket
    node: int | None = None
    received: bytearray = field(default_factory=bytearray)


class _Chief:
    def __init__(self, cluster: Cluster, report_s: float) -> None:
        self._cluster, self._report_s = cluster, report_s
        self._selector = selectors.DefaultSelector()
        self._here: dict[int, _Peer] = {}

    def gather(self, timeout_s: float) -> None:
        began_s = time.monotonic()
        deadline_s, report_at_s = began_s + timeout_s, began_s + self._report_s
        with _listen(self._cluster) as listener:
            self._selector.register(listener, selectors.EVENT_READ, None)
            while self._missing():
                now_s = time.monotonic()
                if now_s >= deadline_s:
                    break
                if now_s >= report_at_s:
                    report_at_s += self._report_s
                    self._report()
                self._wait(listener, min(deadline_s, report_at_s) - now_s)
            self._selector.unregister(listener)
        # Only now, with the port free, may anybody start torchrun.
        missing = self._missing()
        if missing:
            error = self._missing_error(missing, timeout_s)
            self._dismiss(f"fail {error.found}")
            raise error
        self._dismiss("go")

    def _missing(self) -> list[int]:
        return [node for node in range(1, self._cluster.num_nodes) if node not in self._here]

    def _names(self, nodes: list[int]) -> str:
        return ", ".join(node_name(self._cluster, node) for node in nodes)

    def _missing_error(self, missing: list[int], timeout_s: float) -> UserError:
        count = self._cluster.num_nodes
        return UserError(
            f"{self._names(missing)} did not come within {timeout_s:g} s: {count - len(missing)} of {count} nodes are "
            "here",
            expected=f"all {count} nodes of the job",
            fix="look at the log of the missing replicas: their machines may not have started (no capacity, no quota), "
            f"or port {self._cluster.master_port} of the chief may be closed to them",
            code=ExitCode.UNAVAILABLE,
        )

    def _report(self) -> None:
        missing, count = self._missing(), self._cluster.num_nodes
        sentence = f"waiting for {self._names(missing)}, {count - len(missing)} of {count} nodes are here"
        print(f"launcher: {sentence}", flush=True)
        for peer in list(self._here.values()):
            self._send(peer, f"wait {sentence}")

    def _wait(self, listener: socket.socket, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is None:
                connection, _ = listener.accept()
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))
            else:
                self._receive(key.data)

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(MAX_LINE_BYTES)
        except OSError:
            data = b""
        peer.received += data
        if not data or len(peer.received) > MAX_LINE_BYTES:
            self._drop(peer)
        elif peer.node is None and b"\n" in peer.received:
            self._welcome(peer)

    def _welcome(self, peer: _Peer) -> None:
        try:
            hello = json.loads(peer.received)
            node, count = int(hello["node"]), int(hello["nodes"])
        except (ValueError, KeyError, TypeError):  # not one of ours
            return self._drop(peer)
        if count != self._cluster.num_nodes or not 0 < node < count:
            self._send(peer, f"fail the chief knows of {self._cluster.num_nodes} nodes, node {node} of {count}")
            return self._drop(peer)
        if node in self._here:  # it has started again
            self._drop(self._here[node])
        peer.node = node
        self._here[node] = peer

    def _send(self, peer: _Peer, line: str) -> None:
        try:
            peer.socket.sendall(f"{line}\n".encode())
        except OSError:
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        if peer.node is not None and self._here.get(peer.node) is peer:
            del self._here[peer.node]
        self._selector.unregister(peer.socket)
        peer.socket.close()

    def _dismiss(self, line: str) -> None:
        """Say the last line to everybody, and let them hang up first: a port is held by the side that closes."""
        peers = [key.data for key in self._selector.get_map().values() if key.data is not None]
        for peer in peers:
            if peer.node is None:
                self._drop(peer)
            else:
                self._send(peer, line)
        deadline_s = time.monotonic() + GOODBYE_S
        while self._here and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                self._receive(key.data)
        for peer in list(self._here.values()):
            self._drop(peer)
        self._selector.close()


@contextlib.contextmanager
def _listen(cluster: Cluster) -> Iterator[socket.socket]:
    """The chief's port. Over IPv6 too where the machine has it, as a host name may lead to either."""
    port = cluster.master_port
    try:
        try:
            listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in NO_IPV6:
                raise
            listener = socket.create_server(("", port))
    except OSError as error:
        raise from_os_error(error, f"waiting for the other nodes on port {port}") from error
    with listener:
        listener.setblocking(False)
        yield listener


def _check_in(cluster: Cluster, timeout_s: float, report_s: float) -> None:
    chief = node_name(cluster, 0)
    began_s = time.monotonic()
    deadline_s, report_at_s, retry_s = began_s + timeout_s, began_s + report_s, FIRST_RETRY_S
    while True:
        try:
            with socket.create_connection((cluster.master_host, cluster.master_port), timeout=CONNECT_S) as connection:
                if _wait_for_go(connection, cluster, patience_s=3 * report_s):
                    return
            reason = "it hung up"
        except OSError as error:  # its name is not known yet, it is not listening yet, it went away
            reason = str(error)
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise UserError(
                f"the chief, {chief}, did not answer on port {cluster.master_port} within {timeout_s:g} s: {reason}",
                expected="the chief's launcher, waiting for this node",
                fix="look at the chief's log: its machine may not have started",
                code=ExitCode.UNAVAILABLE,
            )
        if now_s >= report_at_s:
            report_at_s += report_s
            print(f"launcher: waiting for {chief}: {reason}", flush=True)
        time.sleep(min(retry_s, max(0.0, deadline_s - now_s)))
        retry_s = min(2 * retry_s, LONGEST_RETRY_S)


def _wait_for_go(connection: socket.socket, cluster: Cluster, patience_s: float) -> bool:
    """Say who this is and wait with the others. False when what answers is not the chief, or is gone."""
    hello = json.dumps({"node": cluster.node_rank, "nodes": cluster.num_nodes})
    connection.sendall(f"{hello}\n".encode())
    connection.settimeout(patience_s)  # the chief says something every `report_s`
    with connection.makefile("rb") as lines:
        while line := lines.readline(MAX_LINE_BYTES):
            word, _, sentence = line.decode("utf-8", "replace").rstrip("\n").partition(" ")
            if word == "go":
                return True
            if word == "wait":
                print(f"launcher: {sentence}", flush=True)
            elif word == "fail":
                raise UserError(sentence, fix="see the chief's log", code=ExitCode.UNAVAILABLE)
            else:
                return False
    return False
