"""Settings under which this machine computes as others do: other kernels, thread counts, and orders of sums.

There is no setting for what `make test` itself computes with. With AVX-512 that is torch's and oneDNN's AVX-512; each
product of MKL has the bits that it has there or under AVX2 (measured on an AMD processor, decision 0003).

Kernels are chosen by three libraries, each by a variable of its own: torch's by ATEN_CPU_CAPABILITY, MKL's matrix
products by MKL_CBWR, oneDNN's convolutions by ONEDNN_MAX_CPU_ISA. They read them when they are loaded, so each setting
needs processes of its own.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

# What test files compare: numbers that may differ a little, and those that may not.
WITHIN = re.compile(r"require_equal_training|assert_close|RELATIVE")
COMPARES = re.compile(WITHIN.pattern + r"|torch\.equal\(|losses\([^)]*\)+ == ")

# Of runs on one process, with which those of several ranks are compared: so that only one of the two is changed.
ALONE_THREADS = "VLMPIPE_TEST_ALONE_THREADS"
ALONE_ROUNDING = "VLMPIPE_TEST_ALONE_ROUNDING"

# What another order of sums changes in an element of a gradient, as a share of the largest of its parameter: up to
# 1.7e-6 was found in a first step between one process and two ranks. Five times that, in every step of the adapters
# in all parts of test_lora.py, moves their moments by 1.3e-3, more than is allowed.
ROUNDING = 2e-6


@dataclass(frozen=True)
class Setting:
    """Variables of the environment, what a processor must have for them, and what of the tests is tried under them."""

    environment: dict[str, str]
    needs: str = ""  # a flag of /proc/cpuinfo
    compared: re.Pattern[str] = COMPARES  # found in the test files that are tried

    def missing(self) -> str:
        """Why the setting cannot be tried here, or nothing."""
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
        return f"this processor has no {self.needs}" if self.needs and self.needs not in flags else ""


def _kernels(torch_has: str, mkl: str, onednn: str) -> dict[str, str]:
    return {"ATEN_CPU_CAPABILITY": torch_has, "MKL_CBWR": mkl, "ONEDNN_MAX_CPU_ISA": onednn}


# Ranks always have one thread: OMP_NUM_THREADS changes what tests compute in their own process. Equality to the bit is
# tried under the kernels that are furthest from those of `make test`.
SETTINGS = {
    "SSE2": Setting(_kernels("default", "COMPATIBLE", "SSE41")),
    "AVX2, 4 threads, rounding": Setting(
        {
            **_kernels("avx2", "AVX2", "AVX2"),
            **{"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4", ALONE_THREADS: "4", ALONE_ROUNDING: str(ROUNDING)},
        },
        needs="avx2",
        compared=WITHIN,
    ),
}


def change_alone() -> None:
    """In a process that trains alone: the threads and the rounding errors that the environment asks for."""
    if threads := os.environ.get(ALONE_THREADS):
        torch.set_num_threads(int(threads))
    if share := os.environ.get(ALONE_ROUNDING):
        register_optimizer_step_pre_hook(lambda optimizer, *_: _round(optimizer, float(share)))


@torch.no_grad()
def _round(optimizer: Optimizer, share: float) -> None:
    """Add errors to all gradients, the same in each process that comes to this step. Zeros of no sum stay zeros."""
    gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    taken = next((state["step"] for state in optimizer.state.values() if "step" in state), 0)
    drawn = torch.Generator().manual_seed(int(taken))
    for gradient in gradients:
        error = torch.empty_like(gradient, device="cpu").uniform_(-share, share, generator=drawn)
        _add(gradient, error * gradient.abs().max())


def _add(gradient: Tensor, error: Tensor) -> None:
    gradient.add_(torch.where(gradient != 0, error, 0))
