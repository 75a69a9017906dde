"""Runs groups of processes of server_group.py on this machine, and restarts the worker that kills itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.paths import ROOT

PROGRAM = Path(__file__).with_name("server_group.py")
LIMIT_S = 240.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Group:
    """Two workers and some servers; or two ranks of DistributedDataParallel."""

    steps: int
    staleness: int = 0
    servers: int = 2
    ddp: bool = False
    each_s: float = 0.0  # all workers take at least this long for a micro-batch
    slow: int = -1  # rank of a worker that takes `slow_s` longer for each micro-batch; -2: the workers in turn
    slow_s: float = 0.0
    kill: Sequence[int] = field(default=(-1, -1))  # rank, and how many micro-batches it makes before
    workers: int = 2

    def run(self, folder: Path, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The weights, and what rank 0 measured."""
        settings = {
            "workers": self.workers, "steps": self.steps, "staleness": self.staleness, "learning_rate": 0.01,
            "schedule": "cosine",
        }  # fmt: skip
        given = {
            "settings": settings, "servers": self.servers, "ddp": self.ddp, "each_s": self.each_s, "slow": self.slow,
            "slow_s": self.slow_s, "kill": list(self.kill), "weights": f"{name}.pt",
        }  # fmt: skip
        (path := folder / f"{name}-settings.json").write_text(json.dumps(given))
        variables = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
        }  # fmt: skip

        def start(rank: int) -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, str(PROGRAM), str(path)], env={**variables, "RANK": str(rank)})

        size = self.workers + (0 if self.ddp else self.servers)
        processes = {rank: start(rank) for rank in range(size)}
        try:
            self._wait(processes, start)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
        measured = folder / f"{name}.json"
        return torch.load(folder / f"{name}.pt"), json.loads(measured.read_text()) if measured.exists() else {}

    def _wait(self, processes: dict[int, subprocess.Popen[bytes]], start: Any) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in processes.values()):
            assert time.monotonic() < deadline_s, f"after {LIMIT_S:g} s: {[one.poll() for one in processes.values()]}"
            for rank, process in processes.items():
                if process.poll() == -signal.SIGKILL:
                    processes[rank] = start(rank)
            time.sleep(0.1)
        assert {process.returncode for process in processes.values()} == {0}
