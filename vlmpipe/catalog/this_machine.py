"""The machine that this process runs on, as a plan of a local run takes it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.catalog.machines import Device, load_catalog
from vlmpipe.trainer.preflight import nvml

NAME = "this machine"
GIB = 2**30
SAME_MEMORY = 0.1  # of a GPU's memory, by which drivers report more or less of it
MEMORY_FILE = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class LocalMachine:
    """Cores, memory and GPUs of one machine, which all launchers of a local run share.

    Attributes:
        memory_bytes: all of it; in a container its limit.
        free_bytes: that programs could take now; all of it where the system does not say.
        gpus: those that NVIDIA's library lists, in its order, at most as many as CUDA_VISIBLE_DEVICES names.
    """

    cores: int
    memory_bytes: int
    free_bytes: int
    gpus: tuple[Device, ...] = ()

    def text(self) -> str:
        """Cores, memory and GPUs in a phrase."""
        names = dict.fromkeys(gpu.device for gpu in self.gpus)
        count = {name: sum(gpu.device == name for gpu in self.gpus) for name in names}
        gpus = ", ".join(
            f"{count[gpu.device]} x {gpu.device} ({gpu.memory_gib:,.0f} GiB)"
            for gpu in {gpu.device: gpu for gpu in self.gpus}.values()
        )
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        memory = f"{self.memory_bytes / GIB:,.1f} GiB of memory, {self.free_bytes / GIB:,.1f} free"
        return f"{cores}, {memory}, {gpus or 'no GPU'}"

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        gpus = [{"device": gpu.device, "memory_gib": gpu.memory_gib} for gpu in self.gpus]
        return {
            "cores": self.cores,
            "memory_bytes": self.memory_bytes,
            "free_bytes": self.free_bytes,
            "gpus": gpus,
            "text": self.text(),
        }


def this_machine() -> LocalMachine:
    """Machine as the kernel and NVIDIA's library describe it; starts no CUDA context."""
    total, free = _memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = nvml.devices() or []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = len(devices) if named is None else len([device for device in named.split(",") if device.strip()])
    gpus = tuple(_device(name, size / GIB, major + minor / 10) for name, size, (major, minor) in devices[:seen])
    return LocalMachine(cores, total, free, gpus)


def _device(name: str, memory_gib: float, compute_capability: float) -> Device:
    """The catalogue's entry, which has rates, or a GPU of which only memory and capability are known."""
    words = name.replace("-", " ").split()
    for gpu in load_catalog().gpus.values():
        is_close = abs(gpu.memory_gib - memory_gib) <= SAME_MEMORY * gpu.memory_gib
        if gpu.compute_capability == compute_capability and is_close and set(gpu.device.split()) <= set(words):
            return gpu
    return Device(name, memory_gib, compute_capability)


def _memory() -> tuple[int, int]:
    """All memory and free memory, in bytes, within the limit of this process's control group."""
    try:
        lines = dict(line.split(":", 1) for line in MEMORY_FILE.read_text(encoding="utf-8").splitlines())
        total, free = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):  # no Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    limit, used = _number(CONTROL_GROUP / "memory.max"), _number(CONTROL_GROUP / "memory.current")
    if limit is None or limit >= total:
        return total, free
    return limit, min(free, max(0, limit - (used or 0)))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # "max" is no limit
        return None
