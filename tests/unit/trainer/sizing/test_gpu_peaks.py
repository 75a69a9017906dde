"""The trainer's peaks are the planner's, by the names that the devices give themselves."""

from __future__ import annotations

import pytest

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.trainer.sizing.gpu_peaks import TERA, peak_of

# As torch.cuda.get_device_name gives them.
NAMES = {
    "NVIDIA_TESLA_P4": "Tesla P4",
    "NVIDIA_TESLA_P100": "Tesla P100-PCIE-16GB",
    "NVIDIA_TESLA_V100": "Tesla V100-SXM2-16GB",
    "NVIDIA_TESLA_T4": "Tesla T4",
    "NVIDIA_L4": "NVIDIA L4",
    "NVIDIA_RTX_PRO_6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA_TESLA_A100": "NVIDIA A100-SXM4-40GB",
    "NVIDIA_A100_80GB": "NVIDIA A100-SXM4-80GB",
    "NVIDIA_H100_80GB": "NVIDIA H100 80GB HBM3",
    "NVIDIA_H100_MEGA_80GB": "NVIDIA H100 80GB HBM3",
    "NVIDIA_H200_141GB": "NVIDIA H200",
    "NVIDIA_B200": "NVIDIA B200",
    "NVIDIA_GB200": "NVIDIA GB200",
}


def test_every_gpu_of_the_catalog_is_known_with_its_peaks() -> None:
    accelerators = load_catalog().gpus
    assert set(accelerators) == set(NAMES)
    for accelerator, name in NAMES.items():
        for precision in ("bf16", "fp16", "fp32"):
            peak = getattr(accelerators[accelerator], f"{precision}_tflops")
            assert peak_of(name, precision) == (peak * TERA if peak else None), (name, precision)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA T400"])
def test_what_only_looks_like_one_has_none(name: str) -> None:
    assert peak_of(name, "bf16") is None
    assert peak_of("", "fp32") is None  # a CPU
