"""DeepSpeed's side of `damage`: two real ranks that save, are killed while they save, and load."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

RANKS = 2
WIDTH = 128
POLL_S = 0.05
LAST_WORDS_S = 15.0  # for the other rank, after one has ended; then it waits for ever
LONGEST_S = 120.0


@dataclass(frozen=True)
class Job:
    """Save the weights of `step` as `tag`, or load `tag` (empty: what `latest` names)."""

    action: str  # save | save and kill rank 1 | load
    folder: str
    tag: str = ""
    step: int = 0


def weights(step: int) -> torch.Tensor:
    """The weights after `step`."""
    return torch.arange(WIDTH * WIDTH, dtype=torch.float32).reshape(WIDTH, WIDTH) + step


def run(jobs: list[Job]) -> list[list[dict[str, Any]]]:
    """What every rank says of each job, in order; fewer answers where a rank was killed or waited for ever."""
    with tempfile.TemporaryDirectory() as scratch:
        spawn = multiprocessing.get_context("spawn").Process
        ranks = [spawn(target=_rank, args=(Path(scratch), rank, jobs)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        try:
            _await(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        results = [Path(scratch, f"rank-{rank}.json") for rank in range(RANKS)]
        return [json.loads(path.read_text(encoding="utf-8")) if path.exists() else [] for path in results]


def _await(ranks: list[SpawnProcess]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if not all(process.is_alive() for process in ranks):
            deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
        time.sleep(POLL_S)


def _rank(folder: Path, rank: int, jobs: list[Job]) -> None:
    """Do the jobs in turn, and write what came of each."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    log = (folder / f"rank-{rank}.log").open("w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):  # also of the compilers that DeepSpeed starts
        os.dup2(log.fileno(), stream.fileno())
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=LONGEST_S))
    engine = _engine()
    results: list[dict[str, Any]] = []
    for job in jobs:
        try:
            results.append({"step": _do(engine, job, rank)})
        except Exception as error:  # whatever the library raises is its answer
            results.append({"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"})
        (folder / f"rank-{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    os._exit(0)  # gloo's threads may abort a process that ends the usual way


def _engine() -> Any:
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # its build takes minutes
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    settings = {
        "train_batch_size": RANKS,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.SGD(module.parameters()), config=settings, dist_init_required=False
    )
    return engine


def _do(engine: Any, job: Job, rank: int) -> int | None:
    """The step whose weights the rank has now; None when they are those of no step."""
    if job.action == "load":
        engine.load_checkpoint(job.folder, tag=job.tag or None)
        found = engine.module.weight.detach().flatten()
        mine = engine.optimizer.single_partition_of_fp32_groups[0].detach()
        for step in (1, 2):
            expected = weights(step).flatten()
            half = expected[rank * len(mine) : (rank + 1) * len(mine)]
            if torch.equal(found, expected) and torch.equal(mine, half):
                return step
        return None
    with torch.no_grad():
        engine.module.weight.copy_(weights(job.step))
        partition = engine.optimizer.single_partition_of_fp32_groups[0]
        partition.copy_(weights(job.step).flatten()[rank * len(partition) : (rank + 1) * len(partition)])
    if job.action != "save" and rank == 1:
        torch.save = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    engine.save_checkpoint(job.folder, tag=job.tag)
    return job.step
