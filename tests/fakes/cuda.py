"""A stand-in for torch.cuda: GPUs with a name, memory and compute capability, whose products the CPU computes.

Strict where a test could otherwise pass by accident: a GPU for which torch has no code raises what CUDA raises.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
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


class CudaDevices(threading.local):
    """The current device of each thread, by torch.cuda's own functions: GPU 0 in a thread that has chosen none.

    `contexts`: the devices on which waiting for a stream or pinning memory has opened one.
    """

    current = 0

    def __init__(self, contexts: set[int]) -> None:
        """Called again in each thread."""
        self.contexts = contexts

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch, *, device: int) -> CudaDevices:
        """In place of torch.cuda, in a process that has chosen `device` in this thread."""
        devices = cls(set())
        devices.current = device
        for name in ("current_device", "set_device", "current_stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(devices, name))
        monkeypatch.setattr(torch.Tensor, "pin_memory", devices.pin)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        return devices

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: int | torch.device) -> None:
        self.current = device if isinstance(device, int) else device.index

    def current_stream(self) -> FakeStream:
        return FakeStream(self, self.current)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.contexts.add(self.current)
        return tensor

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.device
        yield
        self.current = before


@dataclass(frozen=True)
class FakeStream:
    """The default stream of a device."""

    devices: CudaDevices = field(compare=False)
    device: int

    def synchronize(self) -> None:
        self.devices.contexts.add(self.device)
