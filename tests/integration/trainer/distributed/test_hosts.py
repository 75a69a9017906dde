"""The launcher on two hosts of this machine, over a cable whose bandwidth is known.

Each host is a network namespace with its own address, so nothing but the cable joins the replicas.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.images.hosts import HOSTS, kill_all, known_names, shape, two_hosts
from tests.support.trainer.runs import make_run, metrics
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.collectives import CPU_SIZES_BYTES, FILE

RATE_MBIT_PER_S = 40
RATE_GB_PER_S = RATE_MBIT_PER_S / 8000
BURST_BYTES = 64 << 10  # that the bucket lets pass at once
SIZE_BYTES = CPU_SIZES_BYTES[1]  # far above the burst, and below what the bucket queues before it drops
# What of the link's rate is seen at least. Headers take some 5 %; gloo's all-gather sends and receives by turns some of
# the time, and of a reduce-scatter it makes an all-reduce, which carries twice as much. Seen: 0.94, 0.73 and 0.47.
LEAST_SHARE = {"all_reduce": 0.85, "all_gather": 0.6, "reduce_scatter": 0.4}
PORT = 2222
TIMEOUT_S = 240.0


def _why_not() -> str:
    """Why this machine cannot shape a link between two hosts of its own; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"no {missing[0]} on this machine (iproute2)"
    try:
        with two_hosts():
            shape(RATE_MBIT_PER_S)
    except subprocess.CalledProcessError as error:
        return f"this machine refuses: {' '.join(error.cmd)}"
    return ""


def _train(job: JobConfig, *, mbit_per_s: int = 0) -> None:
    """Train on the two hosts as Vertex AI starts two replicas; at that rate, or as fast as the kernel copies."""
    with two_hosts() as hosts:
        if mbit_per_s:
            shape(mbit_per_s)
        with _started(job, hosts, list(hosts.values())) as replicas:
            _end_well(replicas)


@contextmanager
def _started(job: JobConfig, hosts: Iterable[str], names: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """The replicas of some of the hosts, whose addresses or names CLUSTER_SPEC gives; killed at the end."""
    cluster = {f"workerpool{pool}": [f"{name}:{PORT}"] for pool, name in enumerate(names)}
    replicas = [_replica(host, job, cluster, f"workerpool{list(HOSTS).index(host)}") for host in hosts]
    try:
        yield replicas
    finally:
        for process in replicas:
            process.kill()


def _end_well(replicas: Iterable[subprocess.Popen[str]]) -> None:
    ends = [(process.communicate(timeout=TIMEOUT_S)[0], process.returncode) for process in replicas]
    assert [code for _, code in ends] == [0, 0], "\n".join(said for said, _ in ends)


def _replica(host: str, job: JobConfig, cluster: dict[str, Any], pool: str) -> subprocess.Popen[str]:
    told = {"cluster": cluster, "environment": "cloud", "task": {"type": pool, "index": 0}}
    # This machine's own name leads gloo to an address that the host has not; in a container it has.
    environment = os.environ | {"CLUSTER_SPEC": json.dumps(told), "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vlmpipe.trainer.launch", "--nproc-per-node", "1", "--", "vlmpipe.trainer.train"]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *command, "--config", f"{job.run.run_uri}/run.json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_slow_link_is_measured_and_changes_only_the_time(tmp_path: Path) -> None:
    if why := _why_not():
        pytest.skip(why)
    changes = {"train.measure_communication": True, "train.max_steps": 4}
    fast, slow = (make_run(tmp_path, name, changes, features="off") for name in ("fast", "slow"))
    _train(fast)
    _train(slow, mbit_per_s=RATE_MBIT_PER_S)

    assert [line["loss"] for line in metrics(slow)] == [line["loss"] for line in metrics(fast)]
    assert _step_s(slow) > _step_s(fast)
    measured, unshaped = _measured(slow), _measured(fast)
    for collective, least in LEAST_SHARE.items():
        share = measured[collective] / RATE_GB_PER_S
        assert least < share < 1 + BURST_BYTES / SIZE_BYTES, f"{collective} at {share:.2f} of the link's rate"
        assert unshaped[collective] > 2 * measured[collective]


@pytest.mark.slow
def test_late_chief_with_a_late_host_name_is_awaited(tmp_path: Path) -> None:
    if why := _why_not():
        pytest.skip(why)
    straight, late = (make_run(tmp_path, name, {"train.max_steps": 4}, features="off") for name in ("straight", "late"))
    _train(straight)
    with two_hosts() as hosts, known_names() as know:
        (chief, worker), names = hosts, ("chief.test", "worker.test")
        know(chief, "chief.test", hosts[chief])
        with _started(late, [worker], names) as [waiting]:
            assert waiting.stdout is not None
            said = next(line for line in waiting.stdout if "waiting for workerpool0-0 (chief.test)" in line)
            assert "not known" in said or "name resolution" in said, said
            know(worker, "chief.test", hosts[chief])
            said = next(line for line in waiting.stdout if "waiting for workerpool0-0 (chief.test)" in line)
            assert "refused" in said, said  # it has the address, and nobody listens there yet
            with _started(late, [chief], names) as [started]:
                _end_well([started, waiting])
    assert [line["loss"] for line in metrics(late)] == [line["loss"] for line in metrics(straight)]


@pytest.mark.slow
def test_lost_host_ends_the_job_and_the_next_start_resumes(tmp_path: Path) -> None:
    if why := _why_not():
        pytest.skip(why)
    changes = {"train.checkpoint_every_steps": 2}
    straight, broken = (make_run(tmp_path, name, changes, features="off") for name in ("straight", "broken"))
    _train(straight)
    undisturbed = {line["step"]: line["loss"] for line in metrics(straight)}
    with two_hosts() as hosts:
        shape(RATE_MBIT_PER_S)  # steps that take long enough to die between them
        with _started(broken, hosts, list(hosts.values())) as [chief, worker]:
            _until(lambda: list(Path(broken.run.run_uri).rglob("COMMIT")), chief)
            kill_all(list(hosts)[1])
            said, _ = chief.communicate(timeout=TIMEOUT_S)
            worker.communicate(timeout=TIMEOUT_S)
        assert worker.returncode == -signal.SIGKILL
        assert chief.returncode not in (0, -signal.SIGKILL), said
        assert 2 <= len(metrics(broken)) < len(undisturbed), said
        with _started(broken, hosts, list(hosts.values())) as replicas:
            _end_well(replicas)
    assert {line["step"]: line["loss"] for line in metrics(broken)} == undisturbed


def _until(seen: Callable[[], object], running: subprocess.Popen[str]) -> None:
    """Wait for something that a process leaves on the disk."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not seen():
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def _measured(job: JobConfig) -> dict[str, float]:
    """Bus bandwidth by collective."""
    speeds = json.loads(Path(job.run.run_uri, FILE).read_text(encoding="utf-8"))
    return {each["collective"]: each["bus_gb_per_s"] for each in speeds if each["bytes"] == SIZE_BYTES}


def _step_s(job: JobConfig) -> float:
    return sum(line["step_s"] for line in metrics(job)[1:])  # the first one also opens connections
