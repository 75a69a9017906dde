"""A stand-in for torch.cuda: GPUs with a name, memory and compute capability, whose products the CPU computes.

Strict where a test could otherwise pass by accident: a GPU for which torch has no code raises what CUDA raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

L4 = ("NVIDIA L4", 23034 << 20, (8, 9))
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be ..."
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by ..."


@dataclass
class FakeCuda:
    """vlmpipe.trainer.preflight.gpus.Cuda. broken: by index, the error that computing there raises."""

    gpus: Sequence[tuple[str, int, tuple[int, int]]] = ()
    cuda: str = "12.6"
    archs: tuple[str, ...] = ("sm_80", "sm_86", "sm_90")
    error: str = ""
    broken: dict[int, str] = field(default_factory=dict)
    wrong: frozenset[int] = frozenset()  # GPUs that answer zeros

    def versions(self) -> tuple[str, str, str]:
        return "2.13.0", self.cuda, "2.29.7" if self.cuda else ""

    def arch_list(self) -> Sequence[str]:
        return self.archs

    def count(self) -> int:
        return len(self.gpus)

    def start(self) -> None:
        if not self.gpus:
            raise RuntimeError(self.error or "No CUDA GPUs are available")

    def properties(self, index: int) -> tuple[str, int, tuple[int, int]]:
        return self.gpus[index]

    def device(self, index: int) -> torch.device:
        assert index < len(self.gpus)
        return torch.device("cpu")

    def product(self, index: int, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if index in self.broken:
            raise RuntimeError(self.broken[index])
        return (left @ right) * (index not in self.wrong)

    def synchronize(self, index: int) -> None:
        assert index < len(self.gpus)
