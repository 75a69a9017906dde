"""Gauges through NVIDIA's own Python binding, from a strict library in the driver's place."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest
import torch

from tests.support.paths import ROOT
from vlmpipe.trainer.monitoring.gpu_telemetry import (
    NOTHING,
    GpuFaultWatch,
    GpuReading,
    GpuTelemetry,
    metrics_of,
    open_telemetry,
)

UUID = "GPU-0000-1"
FULL = {
    "utilization": 97, "memory_bytes": 3 << 29, "power_mw": 310_500, "temperature_c": 64, "reasons": 0x4,
    "ecc_uncorrected": 2, "ecc_others": 1000,
}  # fmt: skip
Gauges = Callable[[dict[str, int]], None]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library under the driver's own name: once it is loaded, a later load by that name finds it."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = str(ROOT / "tests/fakes/nvml/nvml.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(path), source],
        check=True,
    )
    return ctypes.CDLL(str(path))


@pytest.fixture
def gauges(driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gauges]:
    """Sets the device's gauges."""
    state = tmp_path / "gauges"
    monkeypatch.setenv("FAKE_NVML", str(state))
    monkeypatch.setattr(pynvml, "nvmlLib", driver)
    yield lambda values: state.write_text("".join(f"{name} {value}\n" for name, value in values.items())) and None
    assert driver.nvmlShutdown() == pynvml.NVML_ERROR_UNINITIALIZED, "a reader was not closed"


def read(values: dict[str, int], gauges: Gauges) -> GpuReading:
    gauges(values)
    telemetry = GpuTelemetry(UUID)
    try:
        return telemetry.read()
    finally:
        telemetry.close()


def test_gauges_are_read_in_their_units(gauges: Gauges) -> None:
    assert read(FULL, gauges) == GpuReading(97.0, 1.5, 310.5, 64.0, 0.0, 2.0), "a cap on power is no fault"
    assert read(FULL | {"reasons": 0x44}, gauges).throttle_reasons == 0x40


@pytest.mark.parametrize("values", [{}, FULL | {"lost": 1}], ids=["without gauges", "lost"])
def test_what_a_device_does_not_have_is_not_a_number(gauges: Gauges, values: dict[str, int]) -> None:
    found = read(values, gauges)
    assert all(map(math.isnan, dataclasses.astuple(found)))
    assert metrics_of([found, NOTHING]) == {}
    slice_of_a_gpu = read({name: FULL[name] for name in ("memory_bytes", "power_mw")}, gauges)
    assert metrics_of([slice_of_a_gpu]) == {"gpu_memory_gib": 1.5, "gpu_power_w": 310.5}


def test_an_unknown_gpu_is_an_error_that_leaves_the_library_closed(gauges: Gauges) -> None:
    with pytest.raises(pynvml.NVMLError_NotFound):
        GpuTelemetry("GPU-other")


def test_the_stand_in_is_strict(driver: ctypes.CDLL, gauges: Gauges) -> None:
    gauges(FULL)
    found = ctypes.c_uint()
    assert driver.nvmlDeviceGetPowerUsage(None, ctypes.byref(found)) == pynvml.NVML_ERROR_UNINITIALIZED
    pynvml.nvmlInit()
    assert driver.nvmlDeviceGetPowerUsage(None, ctypes.byref(found)) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetHandleByUUID(b"0000-1")
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetTemperature(pynvml.nvmlDeviceGetHandleByUUID(UUID.encode()), 1)
    pynvml.nvmlShutdown()


def test_a_line_has_the_extremes_of_all_ranks() -> None:
    ranks = [GpuReading(90, 10, 300, 60, 0, 0), GpuReading(50, 12, 200, 80, 0x40, 3), NOTHING]
    assert metrics_of(ranks) == {
        "gpu_utilization": 70, "gpu_utilization_min": 50, "gpu_memory_gib": 12, "gpu_power_w": 250,
        "gpu_temperature_c": 80, "gpus_throttled": 1, "gpu_ecc_errors": 3,
    }  # fmt: skip


def test_a_fault_is_noted_once_per_rank_and_kind() -> None:
    well, hot = GpuReading(90, 10, 300, 60, 0, 0), GpuReading(40, 10, 150, 90, 0x20, 0)
    hotter, broken = dataclasses.replace(hot, throttle_reasons=0x60), dataclasses.replace(hot, ecc_errors=3)
    watch = GpuFaultWatch()
    assert watch.note([well, NOTHING]) == {}
    assert watch.note([well, hot]) == {1: "is throttled (software thermal slowdown)"}
    assert [watch.note([well, reading]) for reading in (hot, well, hot, NOTHING, hot)] == [{}] * 5, "it comes and goes"
    assert watch.note([hot, hotter]) == {
        0: "is throttled (software thermal slowdown)",
        1: "is throttled (hardware thermal slowdown)",
    }
    assert watch.note([broken, hotter]) == {0: "has 3 uncorrected memory errors (ECC)"}
    assert watch.note([dataclasses.replace(broken, ecc_errors=4), well]) == {}


def test_cpus_have_none() -> None:
    assert open_telemetry(torch.device("cpu")) is None
