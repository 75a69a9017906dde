"""Detects whether the Reduction Server that a job pays for is in use.

The plugin that NCCL needs for it is closed, and the text of its log is not known. Two things can be seen without it:

- which NCCL network plugin is mapped into this process (/proc/self/maps, files named libnccl-net*);
- whether this process has established TCP connections to the reducers that CLUSTER_SPEC names. In training with a
  Reduction Server each worker connects to all reducer hosts (Vertex AI's documentation, "Distributed training").

A connection to a reducer's address counts at any port: which one the reducers listen at is not documented, and nothing
else in a trainer talks to their machines. Never seen with the real plugin.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Literal

from trainer.distributed.cluster_env import read_cluster

Address = IPv4Address | IPv6Address
State = Literal["active", "absent"]

ESTABLISHED = "01"  # of the kernel's TCP states (include/net/tcp_states.h)
REMOTE, STATE, INODE = 2, 3, 9  # columns of /proc/net/tcp (Documentation/networking/proc_net_tcp.rst)
PLUGIN = re.compile(r"libnccl-net[^/\s]*$")
RESOLVE_S = 10.0  # the longest that training waits, once, for the reducers' names


class Reducers:
    """The job's reducers, as this process sees them. Their names are looked up while training goes on."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        self._addresses: dict[str, set[Address]] = {}
        self._lookup = threading.Thread(target=self._resolve, name="reducers", daemon=True)
        self._lookup.start()
        self._patience_s = RESOLVE_S

    @classmethod
    def of_job(cls, environment: Mapping[str, str]) -> Reducers | None:
        """None where the job has no reducers, and where they have no machines: jobs on one machine only name them."""
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
        """What to say, and to do, when not all nodes use the reducers."""
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


def state_of(nodes_connected: int, nodes: int) -> State:
    """Active when every node is connected: an all-reduce takes part in all of them or goes another way."""
    return "active" if nodes_connected == nodes else "absent"


def connected_nodes(by_rank: Sequence[float], ranks_per_node: int) -> int:
    """Nodes with a rank that is connected. NCCL sends from some GPUs of a node for all of them, so one is enough."""
    return sum(any(by_rank[first : first + ranks_per_node]) for first in range(0, len(by_rank), ranks_per_node))


def net_plugins() -> list[str]:
    """Files of NCCL network plugins that are mapped into this process."""
    return plugins_in(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))


def plugins_in(maps: str) -> list[str]:
    """Names of the plugins' files, of the text of /proc/PID/maps."""
    found = (PLUGIN.search(line.removesuffix(" (deleted)")) for line in maps.splitlines())
    return sorted({match[0] for match in found if match})


def connections() -> set[Address]:
    """Addresses that this process has established TCP connections to: the kernel's tables are of all its container."""
    tables = [Path("/proc/self/net/tcp")]
    if Path("/proc/self/net/tcp6").exists():  # not on a machine without IPv6
        tables.append(Path("/proc/self/net/tcp6"))
    own = _socket_inodes()
    return set().union(*(remote_addresses(table.read_text(encoding="ascii"), own) for table in tables))


def remote_addresses(table: str, inodes: Collection[int]) -> set[Address]:
    """The far ends of established connections in the text of /proc/net/tcp or tcp6, of these sockets."""
    rows = (line.split() for line in table.splitlines()[1:])
    return {
        parse_address(row[REMOTE].partition(":")[0])
        for row in rows
        if row[STATE] == ESTABLISHED and int(row[INODE]) in inodes
    }


def parse_address(digits: str) -> Address:
    """An address as the kernel prints it: hexadecimal words of 4 bytes, each in this machine's byte order.

    An IPv4 address in an IPv6 socket comes back as what it is.
    """
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return _plain(IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed))


def resolve(host: str) -> set[Address]:
    """The host's addresses; none for a name that cannot be looked up."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {_plain(ip_address(str(address[0]).partition("%")[0])) for *_, address in found}


def _plain(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _socket_inodes() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                found.add(int(inode.strip("[]")))
    return found
