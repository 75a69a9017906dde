"""How many GPUs this machine has, without torch."""

from __future__ import annotations

import glob
from collections.abc import Mapping

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.preflight.gpus import DEVICE_FILES, look


def visible_gpus(environment: Mapping[str, str]) -> int:
    """GPUs with a device file, at most as many as CUDA_VISIBLE_DEVICES names. Whether they compute is not known."""
    files = len(glob.glob(DEVICE_FILES))
    named = environment.get("CUDA_VISIBLE_DEVICES")
    return files if named is None else min(files, len([name for name in named.split(",") if name.strip()]))


def require_gpu_each(environment: Mapping[str, str], ranks: int) -> None:
    """Raise UserError (78) where torch sees GPUs here, but fewer than ranks: two ranks cannot share one by NCCL.

    ranks: processes on this machine, of all nodes of the job that it stands in for.
    """
    if not 0 < visible_gpus(environment) < ranks:
        return
    count = len(look().gpus)
    if 0 < count < ranks:
        raise UserError(
            f"{ranks} processes are to train on this machine, and torch sees {count} GPUs",
            expected="a GPU for each process, or none for any",
            fix=f"start fewer (cluster.processes_per_replica={count}, cluster.replica_count=1), or train on the CPU "
            "(CUDA_VISIBLE_DEVICES set to nothing)",
            code=ExitCode.MACHINE,
        )
