"""Check-in of nodes at the chief before torchrun starts, so that a missing node is named.

torchrun's own rendezvous waits silently and ends with a count. Vertex AI starts each replica when its machine is ready,
minutes apart, so waiting is normal, and an error must name the missing node.

The chief listens on the master port, the only port known to be open between replicas (2222 in CLUSTER_SPEC). It closes
the port before it lets any node continue, so that torchrun finds it free. A node whose connection is refused, or
answered by something else (the torchrun of a job that is still ending), tries again. torch's TCPStore would not do: it
does not report that a waiting node died, and cannot tell an earlier job's store from this one's.

    node -> chief   {"node": 2, "nodes": 4}
    chief -> node   wait <sentence> | go | fail <sentence>      each a line; `wait` is repeated while others are missing
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import time

from vlmpipe.trainer.distributed.cluster_env import Cluster
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, from_os_error

TIMEOUT_VARIABLE = "VLMPIPE_RENDEZVOUS_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 900  # replicas start minutes apart
REPORT_S = 30.0
FIRST_RETRY_S, MAX_RETRY_S = 0.05, 2.0
CONNECT_S = 5.0
GOODBYE_S = 5.0  # for nodes to hang up
MAX_LINE_BYTES = 4096
NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)


def rendezvous_timeout_s() -> int:
    """Seconds that nodes wait for each other. Raises ConfigError when the environment variable is not a number."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_S))
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{TIMEOUT_VARIABLE} is {text!r}", expected="seconds, a whole number of at least 1")
    return int(text)


def meet(cluster: Cluster, *, timeout_s: float, report_s: float = REPORT_S) -> None:
    """Return on every node once all are here. Raises UserError (exit 69) that names the missing ones."""
    if cluster.num_nodes == 1:
        return
    if cluster.node_rank:
        _check_in(cluster, timeout_s, report_s)
    else:
        asyncio.run(_Chief(cluster, report_s).gather(timeout_s))


def node_name(cluster: Cluster, node: int) -> str:
    """A node's name in Vertex AI's logs, with its host; elsewhere its host, which is the name of its pod."""
    host = cluster.hosts[node].rpartition(":")[0]
    if not cluster.in_pools:
        return host
    return f"{'workerpool0-0' if node == 0 else f'workerpool1-{node - 1}'} ({host})"


class _Chief:
    def __init__(self, cluster: Cluster, report_s: float) -> None:
        self._cluster, self._report_s = cluster, report_s
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._here: dict[int, asyncio.StreamWriter] = {}  # nodes that have checked in
        self._arrived = asyncio.Event()

    async def gather(self, timeout_s: float) -> None:
        with _listen(self._cluster.master_port) as listener:
            server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_LINE_BYTES)
            reports = asyncio.create_task(self._report())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while self._missing():
                        self._arrived.clear()
                        await self._arrived.wait()
            reports.cancel()
            server.close()
        # Only now, with the port free, may a node start torchrun.
        error = self._missing_error(timeout_s) if self._missing() else None
        await self._dismiss(f"fail {error.found}\n" if error else "go\n")
        if error:
            raise error

    def _missing(self) -> list[int]:
        return [node for node in range(1, self._cluster.num_nodes) if node not in self._here]

    def _missing_names(self) -> str:
        return ", ".join(node_name(self._cluster, node) for node in self._missing())

    def _count(self) -> str:
        return f"{1 + len(self._here)} of {self._cluster.num_nodes} nodes are here"

    def _missing_error(self, timeout_s: float) -> UserError:
        return UserError(
            f"{self._missing_names()} did not come within {timeout_s:g} s: {self._count()}",
            expected=f"all {self._cluster.num_nodes} nodes of the job",
            fix="look at the log of the missing replicas: their machines may not have started (no capacity, no quota), "
            f"or port {self._cluster.master_port} of the chief may be closed to them",
            code=ExitCode.UNAVAILABLE,
        )

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._report_s)
            sentence = f"waiting for {self._missing_names()}, {self._count()}"
            print(f"launcher: {sentence}", flush=True)
            for writer in self._here.values():
                writer.write(f"wait {sentence}\n".encode())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until the node hangs up."""
        task = asyncio.current_task()
        assert task
        self._connections[task] = writer
        node, nodes = 0, self._cluster.num_nodes
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # lost, or not a node
            hello = json.loads(await reader.readline())
            node, count = int(hello["node"]), int(hello["nodes"])
            if count != nodes or not 0 < node < count:
                writer.write(f"fail the chief knows of {nodes} nodes, node {node} of {count}\n".encode())
            else:
                if node in self._here:  # it has restarted
                    self._here[node].close()
                self._here[node] = writer
                self._arrived.set()
                while await reader.read(MAX_LINE_BYTES):
                    pass
        if self._here.get(node) is writer:
            del self._here[node]
        del self._connections[task]
        writer.close()

    async def _dismiss(self, line: str) -> None:
        """Send the last line and let the nodes hang up first: the side that closes a connection blocks its port."""
        for writer in self._connections.values():
            if writer in self._here.values():
                writer.write(line.encode())
            else:
                writer.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=GOODBYE_S)


def _listen(port: int) -> socket.socket:
    """Listens on IPv6 too where the machine has it, because a host name may resolve to either."""
    try:
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in NO_IPV6:
                raise
            return socket.create_server(("", port))
    except OSError as error:
        raise from_os_error(error, f"waiting for the other nodes on port {port}") from error


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
        except OSError as error:  # unknown host name, not listening yet, or gone
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
        retry_s = min(2 * retry_s, MAX_RETRY_S)


def _wait_for_go(connection: socket.socket, cluster: Cluster, patience_s: float) -> bool:
    """Check in and wait for the others. False when the chief is gone, or something else answers."""
    hello = json.dumps({"node": cluster.node_rank, "nodes": cluster.num_nodes})
    connection.sendall(f"{hello}\n".encode())
    connection.settimeout(patience_s)  # the chief reports every `report_s`
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
