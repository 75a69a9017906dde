"""What a process can observe of its job's reducers: connections, plugins, names."""

from __future__ import annotations

import json
import mmap
import socket
import threading
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from vlmpipe.trainer.distributed import reduction_server
from vlmpipe.trainer.distributed.reduction_server import (
    Reducers,
    connected_nodes,
    connections,
    net_plugins,
    plugins_in,
    resolve,
    state_of,
)


def spec(nodes: list[str], reducers: list[str]) -> dict[str, str]:
    pools = {"workerpool0": nodes[:1], "workerpool1": nodes[1:], "workerpool2": reducers}
    return {"CLUSTER_SPEC": json.dumps({"cluster": pools, "task": {"type": "workerpool0", "index": 0}})}


def test_only_open_connections_count() -> None:
    there = ip_address("127.0.0.13")
    with socket.create_server((str(there), 0)) as server:
        assert there not in connections()
        with socket.create_connection(server.getsockname()):
            assert there in connections()
        assert there not in connections()


def test_an_ipv4_address_in_an_ipv6_socket_is_the_same_address() -> None:
    with socket.create_server(("127.0.0.13", 0)) as server, socket.socket(socket.AF_INET6) as client:
        client.connect(("::ffff:127.0.0.13", server.getsockname()[1]))
        assert ip_address("127.0.0.13") in connections()


@pytest.mark.parametrize(
    ("by_rank", "per_node", "connected", "state"),
    [
        ([0, 3, 3, 0], 2, 2, "active"),  # one rank is enough for its node
        ([3, 3, 0, 0], 2, 1, "absent"),
        ([0, 0], 1, 0, "absent"),
        ([2, 2, 2], 1, 3, "active"),
    ],
)
def test_active_means_every_node_is_connected(by_rank: list[float], per_node: int, connected: int, state: str) -> None:
    assert connected_nodes(by_rank, per_node) == connected
    assert state_of(connected, len(by_rank) // per_node) == state


def test_mapped_plugin_files_are_found(tmp_path: Path) -> None:
    assert net_plugins() == []
    library = tmp_path / "libnccl-net.so.0"
    library.write_bytes(b"0" * mmap.PAGESIZE)
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert net_plugins() == ["libnccl-net.so.0"]


def test_nccl_itself_is_no_plugin_and_a_replaced_file_still_is() -> None:
    maps = "7f00-7f01 r--p 0 08:01 5 /opt/nccl/lib/libnccl.so.2\n7f02-7f03 r--p 0 08:01 6 {}/libnccl-net-x.so (deleted)"
    assert plugins_in(maps.format("/usr/lib")) == ["libnccl-net-x.so"]


def test_a_job_on_one_machine_has_no_reducers_to_watch() -> None:
    assert Reducers.of_job(spec(["localhost:4000", "localhost:4001"], ["localhost:4002"])) is None
    assert Reducers.of_job(spec(["node-0:2222"], [])) is None
    assert Reducers.of_job({}) is None


def test_reducers_are_those_of_pool_2() -> None:
    found = Reducers.of_job(spec(["127.0.0.1:2222", "127.0.0.2:2222"], ["127.0.0.11:2222", "[::1]:2222"]))
    assert found is not None and found.hosts == ("127.0.0.11", "::1")


def test_an_unknown_host_name_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert resolve("reducer-0") == set()
    reducers = Reducers(["reducer-0", "reducer-1"])
    assert reducers.num_connected() == 0
    assert "0 of 2 nodes are connected" in reducers.warning(0, 2)
    assert "2 of the reducers' names cannot be looked up here" in reducers.warning(0, 2)


def test_training_waits_for_an_unresponsive_name_server_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, waits = threading.Event(), []
    monkeypatch.setattr(
        reduction_server, "resolve", lambda host: {ip_address("127.0.0.11")} if answer.wait() else set()
    )
    reducers = Reducers(["reducer-0"])
    monkeypatch.setattr(reducers._lookup, "join", waits.append)
    assert [reducers.num_connected(), reducers.num_connected()] == [0, 0]
    assert waits == [reduction_server.RESOLVE_S, 0.0]
    answer.set()
