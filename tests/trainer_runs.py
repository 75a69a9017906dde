"""Tiny but real training runs for tests: prepared digits, cached features, and many runs in one process group."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.tiny_runs import TINY, merged
from trainer.config import DataPointers, JobConfig
from trainer.data.prepare import prepare
from trainer.features.store import features_uri
from trainer.progress import Progress
from trainer.storage import open_storage

REPOSITORY = Path(__file__).parent.parent


def make_run(root: Path, run_id: str, changes: dict[str, Any] | None = None, *, features: str = "reuse") -> JobConfig:
    """Write run.json and prepared.json of a run, preparing its data if nothing like it was prepared under `root`."""
    content = merged(TINY, changes or {}) | {"run": {"run_id": run_id, "root_uri": str(root)}}
    store = open_storage(str(root / "runs" / run_id))
    store.write("run.json", json.dumps(content).encode())
    job = JobConfig.load(store.uri("run.json"))
    prepared = prepare(job, Progress(job.run.run_uri, "prepare-data", quiet=True))
    pointers = DataPointers(
        prepared_uri=prepared.uri, features_uri=features_uri(job.run.features_root, job.model), features=features
    )
    store.write("prepared.json", pointers.model_dump_json().encode())
    return job


def torchrun(
    module: str, arguments: list[str], *, processes: int, nodes: int = 1, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run a module under the real torchrun on this machine, with `processes` on each of `nodes`.

    Returns what the first node printed; a failure shows what it or another node did.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}

    def node(rank: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--node-rank", str(rank), "-m", module, *arguments],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    with ThreadPoolExecutor(nodes) as pool:
        ended = list(pool.map(node, range(nodes)))
    for done in ended:
        assert done.returncode == 0, (done.stdout + done.stderr)[-20000:]
    return ended[0]


def train_runs(jobs: list[JobConfig], *, processes: int, nodes: int = 1) -> None:
    """Train several runs one after another in one process group: start-up costs more than these runs do."""
    arguments = ["--configs", *[f"{job.run.run_uri}/run.json" for job in jobs]]
    torchrun("tests.drivers.train_many", arguments, processes=processes, nodes=nodes)


def encode_features(job: JobConfig) -> None:
    """Run the `cache_features` job."""
    torchrun("trainer.features.build", ["--config", f"{job.run.run_uri}/run.json"], processes=1)


def metrics(job: JobConfig) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    text = open_storage(job.run.run_uri).read("metrics.jsonl").decode()
    return [json.loads(line) for line in text.splitlines()]


def losses(job: JobConfig) -> list[float]:
    return [line["loss"] for line in metrics(job)]


def summary(job: JobConfig) -> dict[str, Any]:
    return dict(json.loads(open_storage(job.run.run_uri).read("summary.json")))
