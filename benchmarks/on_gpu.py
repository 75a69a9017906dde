"""What only a GPU can show, by one process: losses beside the host's, steps that read nothing of the device, memory
beside the plan, tokens a second and MFU, what a checkpoint holds up. `make bench-gpu`

Without a GPU its short form (--quick) shows that it works, and measures nothing that is said of GPUs.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.support.suite import Part, Suite


def require_gpu(chosen: argparse.Namespace) -> str:
    """The title of the run."""
    import torch

    if not torch.cuda.is_available() and not chosen.quick:
        raise SystemExit("error: no GPU here\n  to do:    --quick shows on the processor that this works")
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none: no figure here is one of a GPU"


SUITE = Suite(
    "One GPU",
    [
        Part("losses", "gpu.parts", 60, "of every strategy in fp32, beside ddp's on the host"),
        Part("attention", "gpu.parts", 60, "by sample and under a mask, with gradients"),
        Part("reads", "gpu.parts", 60, "steps in which the host waits for the device"),
        Part("memory", "gpu.parts", 180, "the planner's peak, beside the allocator's and the device's"),
        Part("speed", "gpu.parts", 120, "useful tokens a second and MFU of a 1.3-billion-parameter model"),
        Part("checkpoint", "gpu.parts", 120, "how long a snapshot holds training up"),
    ],
    rounds=5,
    device=require_gpu,
)

if __name__ == "__main__":
    sys.exit(SUITE.main(__doc__))
