"""Compiled kernels in a run's checkpoints: a resumed attempt starts with them instead of compiling again.

torch unpickles them and runs what they hold, so they are read where DCP's pickles are: after COMMIT, manifests,
checksums and, with a key, signatures have been verified.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from torch import Tensor

from vlmpipe.trainer.distributed.process import ProcessContext

INDUCTOR = "torch._inductor.codecache"  # not loaded where nothing has been compiled to kernels


def kernel_files(worker: ProcessContext) -> dict[str, Tensor]:
    """File -> inductor's artifacts that this process has compiled or loaded, as bytes; empty where there are none.

    The ranks of the first node save theirs for their like on every node: kernels name the GPU by its number there.
    """
    artifacts = torch.compiler.save_cache_artifacts() if worker.node == 0 and INDUCTOR in sys.modules else None
    return {kernel_file(worker): torch.frombuffer(bytearray(artifacts[0]), dtype=torch.uint8)} if artifacts else {}


def load_kernels(folder: Path, worker: ProcessContext) -> None:
    """Fill this machine's cache from a verified checkpoint, unless it has none from an environment like this one."""
    path = folder / kernel_file(worker)
    if not path.exists():
        return
    artifacts = torch.load(path, weights_only=True).numpy().tobytes()
    try:
        torch.compiler.load_cache_artifacts(artifacts)
    except OSError as error:  # layers are compiled again
        print(f"train: compiled kernels of the checkpoint are not used: {error}", flush=True)


def kernel_file(worker: ProcessContext) -> str:
    """Name of the file with kernels for this rank's environment."""
    environment = [sys.version, torch.__version__, torch.backends.cpu.get_cpu_capability()]
    if worker.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(worker.device)
        environment = [sys.version, torch.__version__, str(torch.version.cuda), gpu.name, f"{gpu.major}.{gpu.minor}"]
    return f"kernels-{hashlib.sha256(' '.join(environment).encode()).hexdigest()[:16]}-{worker.local_rank}.pt"
