"""What only a GPU can show, by one process: losses and kernels beside the host's, jobs killed and resumed, steps
in which the host waits, memory beside the plan, tokens a second and MFU, checkpoints. `make bench-gpu`

Without a GPU its short form (--quick) shows that it works, and measures nothing that is said of GPUs.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.support.suite import Part, Suite
from vlmpipe.trainer.launch import ALLOCATOR_VARIABLES, GROWING_SEGMENTS


def require_gpu(chosen: argparse.Namespace) -> str:
    """The title of the run."""
    os.environ.setdefault(ALLOCATOR_VARIABLES[0], GROWING_SEGMENTS)  # as the launcher does
    import torch

    if not torch.cuda.is_available() and not chosen.quick:
        raise SystemExit("error: no GPU here\n  to do:    --quick shows on the processor that this works")
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none: no figure here is one of a GPU"


SUITE = Suite(
    "One GPU",
    [
        Part("losses", "gpu.losses", 30, "of every strategy in fp32, beside ddp's on the host"),
        Part("kernels", "gpu.losses", 90, "losses of families, precisions and kernels, beside the same on the host"),
        Part("training", "gpu.training", 90, "whole jobs: losses and answers beside the host's, kills and resumes"),
        Part("reads", "gpu.losses", 30, "steps in which the host waits for the device"),
        Part("exactness", "gpu.attention", 20, "attention by sample, with gradients, beside fp64 on the host"),
        Part("attention", "gpu.attention", 30, "the rate by sample and under a mask, with gradients"),
        Part(
            "prefixes", "gpu.prefixes", 120, "attention with shared prefixes, beside FlexAttention and without", False
        ),
        Part("windows", "gpu.attention", 20, "a tower's attention in windows, beside the library's calls"),
        Part("memory", "gpu.memory", 80, "the planner's peak, beside the allocator's and the device's"),
        Part("speed", "gpu.speed", 90, "useful tokens a second and MFU of a 1.3-billion-parameter model"),
        Part("devices", "gpu.devices", 20, "contexts on GPUs of other ranks after a save"),
        Part("copies", "gpu.copies", 40, "copies of one model's tower on tensor-parallel ranks, after some steps"),
        Part("hybrids", "gpu.hybrids", 300, "the kernel of gated delta rules, packing, eager, compiled, liger", False),
        Part("checkpoint", "gpu.checkpoint", 60, "how long a snapshot holds training up"),
    ],
    rounds=5,
    device=require_gpu,
)

if __name__ == "__main__":
    sys.exit(SUITE.main(__doc__))
