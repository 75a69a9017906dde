"""A run says whether the Reduction Server that it pays for is in use: real ranks, real connections."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.short_form import chosen
from tests.support.trainer.runs import make_run, metrics, run_ranks, summary
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.storage import open_storage

# Name of the run: ranks, each on a node of its own, that are connected to the reducers; None for a job without any.
RUNS: dict[str, list[int] | None] = chosen(
    {"used": [0, 1], "unused": [], "half": [0], "none": None}, lambda name: name != "unused"
)
UNUSED = {name: connected for name, connected in RUNS.items() if connected is not None and len(connected) < 2}


@contextlib.contextmanager
def two_reducers() -> Iterator[list[str]]:
    """Servers that take connections, at addresses that no node has."""
    with contextlib.ExitStack() as held:
        servers = [held.enter_context(socket.create_server((f"127.0.0.{last}", 0))) for last in (11, 12)]
        yield ["{}:{}".format(*server.getsockname()) for server in servers]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, JobConfig], str]:
    """The runs, and what rank 0 printed."""
    root = tmp_path_factory.mktemp("reducers")
    settings = {"train.strategy": "ddp", "train.max_steps": 2, "train.log_every_steps": 1}
    jobs = {name: make_run(root, name, settings, features="off") for name in RUNS}
    with two_reducers() as reducers:
        runs: list[dict[str, Any]] = [
            {
                "config": f"{jobs[name].run.run_uri}/run.json",
                "reducers": reducers if connected is not None else [],
                "connected": connected or [],
            }
            for name, connected in RUNS.items()
        ]
        printed = run_ranks(
            "tests.support.drivers.with_reducers", ["--runs", json.dumps(runs)], processes=1, nodes=2, timeout_s=120
        )
    return jobs, printed


@pytest.mark.parametrize(
    ("run", "state", "nodes"),
    [("used", "active", 2), *((name, "absent", len(ranks)) for name, ranks in UNUSED.items())],
)
def test_every_line_and_the_summary_have_the_reduction_servers_state(
    trained: tuple[dict[str, JobConfig], str], run: str, state: str, nodes: int
) -> None:
    job = trained[0][run]
    said = {"reduction_server": state, "reduction_server_nodes": nodes}
    assert [{name: line.get(name) for name in said} for line in metrics(job)] == [said, said]
    assert summary(job) | said | {"nccl_net_plugins": []} == summary(job)


def test_job_without_reducers_reports_none(trained: tuple[dict[str, JobConfig], str]) -> None:
    job = trained[0]["none"]
    assert not [
        name for line in (*metrics(job), summary(job)) for name in line if "reduction" in name or "nccl" in name
    ]


@pytest.mark.parametrize(("run", "nodes"), [(name, len(ranks)) for name, ranks in UNUSED.items()])
def test_partially_used_reducers_are_warned_of_once(
    trained: tuple[dict[str, JobConfig], str], run: str, nodes: int
) -> None:
    jobs, printed = trained
    start = f"2 reducers are paid for and not used: {nodes} of 2 nodes are connected to one"
    assert printed.count(f"train: warning: {start}") == 1
    notes = json.loads(open_storage(jobs[run].run.run_uri).read("steps/train.json"))["detail"]["notes"]
    assert [note.startswith(start) for note in notes] == [True]
    assert "REDUCTION_SERVER=1" in notes[0] and "Fast Socket" in notes[0] and "NCCL_DEBUG=INFO" in notes[0]


def test_no_warning_for_reducers_in_use(trained: tuple[dict[str, JobConfig], str]) -> None:
    assert "notes" not in json.loads(open_storage(trained[0]["used"].run.run_uri).read("steps/train.json"))["detail"]
