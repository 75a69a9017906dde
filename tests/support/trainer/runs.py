"""Tiny but real training runs for tests: prepared digits, cached features, and many runs in one process group."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from tests.support.short_form import PATIENCE
from tests.support.trainer.preloaded import preloaded
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.prepare.pipeline import prepare
from vlmpipe.trainer.feature_cache.store import features_uri
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.storage import open_storage


def make_run(root: Path, run_id: str, changes: dict[str, Any] | None = None, *, features: str = "reuse") -> JobConfig:
    """Write run.json and prepared.json of a run, preparing its data if nothing like it was prepared under `root`."""
    content = merged(TINY, changes or {}) | {"run": {"run_id": run_id, "root_uri": str(root)}}
    store = open_storage(str(root / "runs" / run_id))
    store.write("run.json", json.dumps(content).encode())
    job = JobConfig.load(store.uri("run.json"))
    prepared = prepare(job, Progress(job.run.run_uri, "prepare-data", quiet=True))
    pointers = DataPointers(
        prepared_uri=prepared.uri,
        features_uri=features_uri(job.run.features_root, job.model, job.train.precision),
        features=features,
    )
    store.write("prepared.json", pointers.model_dump_json().encode())
    return job


def run_ranks(module: str, arguments: list[str], *, processes: int, nodes: int = 1, timeout_s: float = 240) -> str:
    """Run a module as torchrun does on this machine, with `processes` on each of `nodes`.

    Returns what the first rank printed; a failure shows what all did.
    """
    codes, said = ends_of_ranks(module, arguments, processes=processes, nodes=nodes, timeout_s=timeout_s)
    assert not any(codes), f"exit codes {codes}\n" + "\n".join(text[-10000:] for text in said)
    return said[0]


def ends_of_ranks(
    module: str, arguments: list[str], *, processes: int, nodes: int = 1, timeout_s: float = 240, **environment: str
) -> tuple[list[int], list[str]]:
    """Exit codes of all ranks (negative for signals), and what each printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="vlmpipe-ranks-") as folder:
        outputs = [Path(folder, str(rank)) for rank in range(nodes * processes)]
        ranks = [
            {"environment": _environment(rank, processes, nodes, port) | environment, "output": str(output)}
            for rank, output in enumerate(outputs)
        ]
        codes = preloaded().run(module, arguments, ranks, timeout_s=PATIENCE * timeout_s)
        return codes, [output.read_text() if output.exists() else "" for output in outputs]


def _environment(rank: int, processes: int, nodes: int, port: int) -> dict[str, str]:
    """What torchrun tells a worker."""
    world = nodes * processes
    told = {
        "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % processes, "LOCAL_WORLD_SIZE": processes,
        "GROUP_RANK": rank // processes, "GROUP_WORLD_SIZE": nodes, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0,
    }  # fmt: skip
    return {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in told.items()}}


def train_runs(jobs: list[JobConfig], *, processes: int, nodes: int = 1, timeout_s: float = 240) -> None:
    """Train several runs one after another in one process group: start-up costs more than these runs do."""
    arguments = ["--configs", *[f"{job.run.run_uri}/run.json" for job in jobs]]
    run_ranks("tests.support.drivers.train_many", arguments, processes=processes, nodes=nodes, timeout_s=timeout_s)


def encode_features(job: JobConfig) -> None:
    """Run the `cache_features` job."""
    run_ranks("vlmpipe.trainer.feature_cache.encode", ["--config", f"{job.run.run_uri}/run.json"], processes=1)


def metrics(job: JobConfig) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    text = open_storage(job.run.run_uri).read("metrics.jsonl").decode()
    return [json.loads(line) for line in text.splitlines()]


def losses(job: JobConfig) -> list[float]:
    return [line["loss"] for line in metrics(job)]


def summary(job: JobConfig) -> dict[str, Any]:
    return dict(json.loads(open_storage(job.run.run_uri).read("summary.json")))
