"""What a process sees of the reducers that its job pays for: connections, plugins, names."""

from __future__ import annotations

import json
import mmap
import socket
import sys
import threading
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.distributed import reduction_server
from trainer.distributed.reduction_server import (
    Reducers,
    connected_nodes,
    connections,
    net_plugins,
    parse_address,
    plugins_in,
    remote_addresses,
    resolve,
    state_of,
)

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
TCP = f"""{HEADER}
   0: 0100007F:08AE 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0 100 0 0 10 0
   1: 0100007F:C350 0B00007F:08AE 01 00000000:00000000 00:00000000 00000000     0        0 12 1 0 20 4 30 10 -1
   2: 0100007F:C351 0C00007F:08AE 06 00000000:00000000 03:00000F5C 00000000     0        0 13 3 0
   3: 0100007F:C352 0D00007F:08AE 01 00000000:00000000 00:00000000 00000000     0        0 14 1 0 20 4 30 10 -1
"""
TCP6 = f"""{HEADER}
   0: 0000000000000000FFFF00000100007F:C350 0000000000000000FFFF00000B00007F:08AE 01 0:0 00:0 0 0 0 21 1 0 20 4 30 10 -1
   1: B80D0120000000000000000001000000:C350 B80D0120000000000000000002000000:08AE 01 0:0 00:0 0 0 0 22 1 0 20 4 30 10 -1
"""


def words(packed: bytes) -> str:
    """As the kernel prints an address."""
    numbers = (int.from_bytes(packed[start : start + 4], sys.byteorder) for start in range(0, len(packed), 4))
    return "".join(f"{number:08X}" for number in numbers)


def spec(nodes: list[str], reducers: list[str]) -> dict[str, str]:
    pools = {"workerpool0": nodes[:1], "workerpool1": nodes[1:], "workerpool2": reducers}
    return {"CLUSTER_SPEC": json.dumps({"cluster": pools, "task": {"type": "workerpool0", "index": 0}})}


@given(st.ip_addresses())
def test_an_address_is_read_as_the_kernel_prints_it(address: IPv4Address | IPv6Address) -> None:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    assert parse_address(words(address.packed)) == (mapped or address)


@pytest.mark.skipif(sys.byteorder == "big", reason="the table is of a little-endian machine")
def test_only_established_connections_of_these_sockets_count() -> None:
    assert remote_addresses(TCP, {11, 12, 13}) == {ip_address("127.0.0.11")}


@pytest.mark.skipif(sys.byteorder == "big", reason="the table is of a little-endian machine")
def test_an_ipv4_address_in_an_ipv6_socket_is_the_same_address() -> None:
    assert remote_addresses(TCP6, {21, 22}) == {ip_address("127.0.0.11"), ip_address("2001:db8::2")}


def test_a_connection_is_seen_from_when_it_is_made_until_it_is_closed() -> None:
    there = ip_address("127.0.0.13")
    with socket.create_server((str(there), 0)) as server:
        assert there not in connections()
        with socket.create_connection(server.getsockname()):
            assert there in connections()
        assert there not in connections()


@pytest.mark.parametrize(
    ("by_rank", "per_node", "connected", "state"),
    [
        ([0, 3, 3, 0], 2, 2, "active"),  # one rank speaks for its node
        ([3, 3, 0, 0], 2, 1, "absent"),
        ([0, 0], 1, 0, "absent"),
        ([2, 2, 2], 1, 3, "active"),
    ],
)
def test_the_server_is_active_when_every_node_is_connected(
    by_rank: list[float], per_node: int, connected: int, state: str
) -> None:
    assert connected_nodes(by_rank, per_node) == connected
    assert state_of(connected, len(by_rank) // per_node) == state


def test_a_plugin_is_known_by_the_file_that_is_mapped(tmp_path: Path) -> None:
    assert net_plugins() == []
    library = tmp_path / "libnccl-net.so.0"
    library.write_bytes(b"0" * mmap.PAGESIZE)
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert net_plugins() == ["libnccl-net.so.0"]


def test_nccl_itself_is_no_plugin_and_a_file_that_was_replaced_still_is() -> None:
    maps = "7f00-7f01 r--p 0 08:01 5 /opt/nccl/lib/libnccl.so.2\n7f02-7f03 r--p 0 08:01 6 {}/libnccl-net-x.so (deleted)"
    assert plugins_in(maps.format("/usr/lib")) == ["libnccl-net-x.so"]


def test_a_job_on_one_machine_only_names_its_reducers() -> None:
    assert Reducers.of_job(spec(["localhost:4000", "localhost:4001"], ["localhost:4002"])) is None
    assert Reducers.of_job(spec(["node-0:2222"], [])) is None
    assert Reducers.of_job({}) is None


def test_reducers_are_those_of_pool_2() -> None:
    found = Reducers.of_job(spec(["127.0.0.1:2222", "127.0.0.2:2222"], ["127.0.0.11:2222", "[::1]:2222"]))
    assert found is not None and found.hosts == ("127.0.0.11", "::1")


def test_a_name_that_cannot_be_looked_up_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert resolve("reducer-0") == set()
    reducers = Reducers(["reducer-0", "reducer-1"])
    assert reducers.num_connected() == 0
    assert "0 of 2 nodes are connected" in reducers.warning(0, 2)
    assert "2 of the reducers' names cannot be looked up here" in reducers.warning(0, 2)


def test_a_name_server_that_does_not_answer_holds_training_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, waits = threading.Event(), []
    monkeypatch.setattr(
        reduction_server, "resolve", lambda host: {ip_address("127.0.0.11")} if answer.wait() else set()
    )
    reducers = Reducers(["reducer-0"])
    monkeypatch.setattr(reducers._lookup, "join", waits.append)
    assert [reducers.num_connected(), reducers.num_connected()] == [0, 0]
    assert waits == [reduction_server.RESOLVE_S, 0.0]
    answer.set()
