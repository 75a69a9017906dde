"""Facts about a machine's GPUs from NVIDIA's management library and the kernel: no torch, no CUDA context."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

DRIVER_FILE = Path("/proc/driver/nvidia/version")


def driver_version() -> str:
    """Version of NVIDIA's driver, from its library or from the kernel; empty where neither is here."""
    try:
        import pynvml
    except ImportError:
        return _of_kernel()
    try:
        pynvml.nvmlInit()
        version = str(pynvml.nvmlSystemGetDriverVersion())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return _of_kernel()
    return version


def devices() -> list[tuple[str, int, tuple[int, int]]] | None:
    """Name, memory in bytes and compute capability of each GPU; None where the library or its package is not here."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        gpus = [_device(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return gpus


def _device(nvml: ModuleType, index: int) -> tuple[str, int, tuple[int, int]]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return str(nvml.nvmlDeviceGetName(handle)), int(nvml.nvmlDeviceGetMemoryInfo(handle).total), (major, minor)


def _of_kernel() -> str:
    try:
        match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", DRIVER_FILE.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return match[1] if match else ""
