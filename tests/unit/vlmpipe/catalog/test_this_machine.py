"""This machine as a plan takes it: its GPUs by the names that drivers give, its memory within a container's limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.catalog import this_machine as module
from vlmpipe.catalog.machines import Gpu
from vlmpipe.catalog.this_machine import LocalMachine, this_machine

GIB = 2**30


def found(monkeypatch: pytest.MonkeyPatch, *gpus: tuple[str, float, tuple[int, int]]) -> LocalMachine:
    listed = [(name, int(memory_gib * GIB), capability) for name, memory_gib, capability in gpus]
    monkeypatch.setattr(module.nvml, "devices", lambda: listed)
    return this_machine()


@pytest.mark.parametrize(
    ("name", "memory_gib", "capability", "known"),
    [
        ("NVIDIA L4", 22.5, (8, 9), "NVIDIA_L4"),
        ("NVIDIA A100-SXM4-80GB", 80.0, (8, 0), "NVIDIA_A100_80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, (8, 0), "NVIDIA_TESLA_A100"),
        ("NVIDIA H200", 139.8, (9, 0), "NVIDIA_H200_141GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, (12, 0), "NVIDIA_RTX_PRO_6000"),
        ("NVIDIA L40S", 44.7, (8, 9), ""),
        ("NVIDIA H100 NVL", 93.6, (9, 0), ""),
        ("NVIDIA GeForce RTX 4090", 23.99, (8, 9), ""),
    ],
)
def test_a_gpu_is_the_catalogues_only_where_name_memory_and_capability_agree(
    monkeypatch: pytest.MonkeyPatch, name: str, memory_gib: float, capability: tuple[int, int], known: str
) -> None:
    (gpu,) = found(monkeypatch, (name, memory_gib, capability)).gpus
    assert (gpu.accelerator_type if isinstance(gpu, Gpu) else "") == known
    assert known or (gpu.label, gpu.compute_capability) == (name, capability[0] + capability[1] / 10)


def test_gpus_are_those_that_cuda_may_see_and_are_counted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [("NVIDIA GeForce RTX 4090", 24.0, (8, 9)), ("NVIDIA L4", 22.5, (8, 9))]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "1 x NVIDIA GeForce RTX 4090 (24 GiB), 1 x L4 (22 GiB)" in found(monkeypatch, *two).text()
    for named, count in (("0", 1), ("", 0), ("0,1", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert len(found(monkeypatch, *two).gpus) == count
    assert found(monkeypatch).text().endswith("no GPU")


def test_memory_is_what_is_free_within_the_limit_of_a_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   4194304 kB\n")
    monkeypatch.setattr(module, "MEMORY_FILE", meminfo)
    monkeypatch.setattr(module, "CONTROL_GROUP", tmp_path)
    assert (this_machine().memory_bytes, this_machine().free_bytes) == (8 * GIB, 4 * GIB)
    (tmp_path / "memory.max").write_text("max\n")
    assert this_machine().memory_bytes == 8 * GIB
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    assert (this_machine().memory_bytes, this_machine().free_bytes) == (3 * GIB, 2 * GIB)
    meminfo.unlink()  # another system than Linux
    assert this_machine().memory_bytes == this_machine().free_bytes > GIB
    assert this_machine().cores >= 1
