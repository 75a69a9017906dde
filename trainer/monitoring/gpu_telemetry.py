"""Gauges of a rank's GPU from NVIDIA's management library: utilization, memory, power, temperature, throttling, ECC.

They are read when a line of metrics is due. A gauge that the device does not have (a MIG slice has no utilization,
consumer cards have no ECC) is not a number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import torch

GIB = 1 << 30
MILLIWATTS = 1000

# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean a fault of the machine. A cap on power is how most GPUs work
# at full load, and an idle one slows down as well.
THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True)
class GpuReading:
    """Gauges at one moment; NaN where the device does not have one."""

    utilization: float = math.nan  # percent of the last sample period in which a kernel ran
    memory_gib: float = math.nan  # used on the device, by all processes
    power_w: float = math.nan
    temperature_c: float = math.nan
    throttle_reasons: float = math.nan  # bits of THROTTLES
    ecc_errors: float = math.nan  # uncorrected, since the driver was loaded


NOTHING = GpuReading()


class GpuTelemetry:
    """Reads the GPU with this UUID ("GPU-..."). `close` it at the end.

    Raises ImportError without the package nvidia-ml-py, and `pynvml.NVMLError` without a driver or such a GPU.
    """

    def __init__(self, uuid: str) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        try:
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            raise

    def read(self) -> GpuReading:
        nvml, gpu = self._nvml, self._gpu
        return GpuReading(
            self._gauge(lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
            self._gauge(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB),
            self._gauge(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / MILLIWATTS),
            self._gauge(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            self._gauge(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & sum(THROTTLES)),
            self._gauge(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
        )

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _gauge(self, read: Callable[[], SupportsFloat]) -> float:
        try:
            return float(read())
        except self._nvml.NVMLError:  # not supported, or the GPU is lost: training itself says so
            return math.nan


def open_telemetry(device: torch.device) -> GpuTelemetry | None:
    """Return the telemetry of a rank's GPU, or None on a CPU and where the library, driver or GPU cannot be read."""
    if device.type != "cuda":
        return None
    try:
        return GpuTelemetry(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception as error:  # no gauge is worth a run
        print(f"train: no GPU telemetry: {error!r}", flush=True)
        return None


def metrics_of(readings: Sequence[GpuReading]) -> dict[str, float]:
    """The gauges of all ranks, by rank, as metrics of a line. Empty where no rank has a gauge."""
    metrics: dict[str, float] = {}
    for name, gauge, combine in (
        ("gpu_utilization", "utilization", _mean),
        ("gpu_utilization_min", "utilization", min),
        ("gpu_memory_gib", "memory_gib", max),
        ("gpu_power_w", "power_w", _mean),
        ("gpu_temperature_c", "temperature_c", max),
        ("gpus_throttled", "throttle_reasons", lambda bits: sum(map(bool, bits))),
        ("gpu_ecc_errors", "ecc_errors", sum),
    ):
        values = [value for value in map(operator.attrgetter(gauge), readings) if not math.isnan(value)]
        if values:
            metrics[name] = combine(values)
    return metrics


class GpuFaultWatch:
    """Reports faults of GPUs: each kind of throttling and ECC errors, once per rank.

    Throttling may come and go with every reading; the metrics hold how often, and how many errors there are by now.
    """

    def __init__(self) -> None:
        self._noted: set[tuple[int, str]] = set()  # rank and kind

    def note(self, readings: Sequence[GpuReading]) -> dict[int, str]:
        """Faults that were not noted before, by rank."""
        warnings = {}
        for rank, reading in enumerate(readings):
            throttled = [text for bit, text in THROTTLES.items() if _bits(reading) & bit and self._is_new(rank, text)]
            faults = [f"is throttled ({', '.join(throttled)})"] if throttled else []
            if reading.ecc_errors > 0 and self._is_new(rank, "ECC"):
                faults.append(f"has {reading.ecc_errors:.0f} uncorrected memory errors (ECC)")
            if faults:
                warnings[rank] = " and ".join(faults)
        return warnings

    def _is_new(self, rank: int, kind: str) -> bool:
        is_new = (rank, kind) not in self._noted
        self._noted.add((rank, kind))
        return is_new


def _bits(reading: GpuReading) -> int:
    return 0 if math.isnan(reading.throttle_reasons) else int(reading.throttle_reasons)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
