"""Detects whether the Reduction Server that a job pays for is in use.

NCCL's plugin for it is closed, and the text of its log is not known. Two facts can be observed without it:

- which NCCL network plugin is mapped into this process (/proc/self/maps, files named libnccl-net*);
- whether this process has established TCP connections to the reducers that CLUSTER_SPEC names. In training with a
  Reduction Server each worker connects to all reducer hosts (Vertex AI's documentation, "Distributed training").

A connection to a reducer's address counts at any port: the reducers' port is not documented, and nothing else in a
trainer connects to their machines. Not yet tested with the real plugin.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Literal

import psutil

from vlmpipe.trainer.distributed.cluster_env import read_cluster
from vlmpipe.trainer.threads import start_thread

Address = IPv4Address | IPv6Address

PLUGIN = re.compile(r"libnccl-net[^/\s]*$")
RESOLVE_S = 10.0  # training waits this long at most, once, for the reducers' names


class Reducers:
    """The job's reducers, as this process sees them. A thread looks up their names."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        self._addresses: dict[str, set[Address]] = {}
        self._lookup = start_thread(self._resolve, name="reducers")
        self._patience_s = RESOLVE_S

    @classmethod
    def of_job(cls, environment: Mapping[str, str]) -> Reducers | None:
        """Return the job's reducers, or None without any. A job on one machine names reducers but has none."""
        cluster = read_cluster(environment)
        if cluster is None:
            return None
        nodes = {_host(node) for node in cluster.hosts}
        hosts = [host for host in map(_host, cluster.reducers) if host not in nodes]
        return cls(hosts) if hosts else None

    def num_connected(self) -> int:
        """Reducers that this process has an established connection to."""
        self._lookup.join(self._patience_s)
        self._patience_s = 0.0
        remote = connections()
        return sum(not remote.isdisjoint(addresses) for addresses in dict(self._addresses).values())

    def warning(self, nodes_connected: int, nodes: int) -> str:
        """Message for a job in which not all nodes use the reducers."""
        plugins = net_plugins()
        loaded = f"NCCL has loaded {', '.join(plugins)}" if plugins else "NCCL has loaded no network plugin"
        unknown = len(self.hosts) - sum(map(bool, dict(self._addresses).values()))
        names = f"; {unknown} of the reducers' names cannot be looked up here" if unknown else ""
        return (
            f"{len(self.hosts)} reducers are paid for and not used: {nodes_connected} of {nodes} nodes are connected "
            f"to one; {loaded} (rank 0{names}). Build the trainer image with REDUCTION_SERVER=1, which removes Fast "
            "Socket; NCCL_DEBUG=INFO in cluster.env shows in the log which plugin NCCL takes. "
            "Without reducers (cluster.reduction_server: null) the run costs less"
        )

    def _resolve(self) -> None:
        for host in self.hosts:
            self._addresses[host] = resolve(host)


def state_of(nodes_connected: int, nodes: int) -> Literal["active", "absent"]:
    """Active when every node is connected: an all-reduce uses the reducers on all nodes or on none."""
    return "active" if nodes_connected == nodes else "absent"


def connected_nodes(by_rank: Sequence[float], ranks_per_node: int) -> int:
    """Nodes with a connected rank. One is enough: NCCL sends from some GPUs of a node for all of them."""
    return sum(any(by_rank[first : first + ranks_per_node]) for first in range(0, len(by_rank), ranks_per_node))


def net_plugins() -> list[str]:
    """Files of NCCL network plugins that are mapped into this process."""
    return plugins_in(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))


def plugins_in(maps: str) -> list[str]:
    """File names of the plugins in the text of /proc/PID/maps."""
    matches = (PLUGIN.search(line.removesuffix(" (deleted)")) for line in maps.splitlines())
    return sorted({match[0] for match in matches if match})


def connections() -> set[Address]:
    """Addresses that this process has established TCP connections to."""
    sockets = psutil.Process().net_connections(kind="tcp")
    return {_address(connection.raddr.ip) for connection in sockets if connection.status == psutil.CONN_ESTABLISHED}


def resolve(host: str) -> set[Address]:
    """The host's addresses; none for an unknown name."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {_address(str(address[0])) for *_, address in entries}


def _address(text: str) -> Address:
    """Parse an address without its IPv6 zone; an IPv4 address in an IPv6 socket becomes IPv4."""
    address = ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
