"""States of random generators in checkpoints: dropout draws from them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.records.commit import CommitRecord

RNG_FILE, CUDA_RNG_FILE = "rng-{rank}.pt", "rng-cuda-{rank}.pt"


def random_states(worker: ProcessContext) -> dict[str, Tensor]:
    """File -> state of this rank's random number generators."""
    states = {RNG_FILE.format(rank=worker.rank): torch.get_rng_state()}
    if worker.device.type == "cuda":
        states[CUDA_RNG_FILE.format(rank=worker.rank)] = torch.cuda.get_rng_state(worker.device)
    return states


def random_state_files(worker: ProcessContext) -> tuple[str, str]:
    """Names of the files with the states of this rank's generators, of the CPU's and of the GPU's."""
    return RNG_FILE.format(rank=worker.rank), CUDA_RNG_FILE.format(rank=worker.rank)


def have_one_layout(saved: CommitRecord, expected: CommitRecord) -> bool:
    """Return whether each rank trains on the sequences and the part of the model that the rank of its number had."""
    return (saved.world_size, saved.degrees) == (expected.world_size, expected.degrees)


def restore_random_states(folder: Path, worker: ProcessContext) -> None:
    """Restore this rank's generators, from the states of the rank of its number in the same layout."""
    cpu, cuda = (folder / file for file in random_state_files(worker))
    if cpu.exists():
        torch.set_rng_state(torch.load(cpu, weights_only=True))
    if cuda.exists() and worker.device.type == "cuda":
        torch.cuda.set_rng_state(torch.load(cuda, weights_only=True), worker.device)


def seed_random_states(seed: int, replica: DataParallelRank, *, step: int) -> None:
    """Seed this rank's generators before the optimizer step `step`, counted from 0.

    Ranks with different tokens draw different dropout masks. The ranks of one model draw equal ones: where they differ,
    the copies of a parameter that several ranks hold would get different updates, and drift apart.
    """
    torch.manual_seed(replica.dropout_seed(seed, step))
