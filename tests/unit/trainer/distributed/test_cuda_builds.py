"""Which GPUs and drivers run a CUDA build of torch."""

from __future__ import annotations

import pytest

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.trainer.distributed.cuda_builds import (
    architectures_of,
    cuda_builds,
    driver_runs,
    has_code_for,
    min_driver,
)


@pytest.mark.parametrize(
    ("architectures", "capability", "expected"),
    [
        ((8.0, 8.6), 8.9, True),  # L4 runs code for 8.6
        ((8.6,), 8.0, False),  # A100 does not
        ((9.0,), 10.0, False),  # no code runs on a later major version
        ((10.0,), 10.3, True),
        ((7.5,), 7.0, False),
        ((), 8.0, False),
    ],
)
def test_code_runs_on_later_minor_versions_of_its_major_version(
    architectures: tuple[float, ...], capability: float, expected: bool
) -> None:
    assert has_code_for(architectures, capability) is expected


def test_each_build_leaves_out_the_gpus_that_it_is_known_to_leave_out() -> None:
    without = {
        build_name: {
            name for name, gpu in load_catalog().gpus.items() if not build.has_code_for(gpu.compute_capability)
        }
        for build_name, build in cuda_builds().items()
    }
    assert without == {
        "cu126": {"NVIDIA_RTX_PRO_6000", "NVIDIA_B200", "NVIDIA_GB200"},
        "cu130": {"NVIDIA_TESLA_P4", "NVIDIA_TESLA_P100", "NVIDIA_TESLA_V100"},
    }


def test_architectures_are_read_from_torchs_names() -> None:
    assert architectures_of(["sm_75", "sm_90a", "sm_100", "sm_120", "compute_120"]) == (7.5, 9.0, 10.0, 12.0)


@pytest.mark.parametrize(
    ("driver", "cuda", "expected"),
    [
        ("580.65.06", "13.0", True),
        ("580", "13.2", True),
        ("575.57.08", "13.0", False),
        ("535.230.02", "12.6", True),
        ("1000.1", "13.0", True),
        ("470.82.01", "12.6", False),
        ("580.65.06", "14.0", None),
    ],
)
def test_a_driver_runs_what_nvidia_says(driver: str, cuda: str, expected: bool | None) -> None:
    assert driver_runs(driver, cuda) is expected


def test_the_default_build_of_the_images_is_known_with_its_driver() -> None:
    build = cuda_builds()["cu130"]
    assert (build.version, build.min_driver, build.min_compute_capability) == ("13.0", "580", 7.5)
    assert min_driver("10.2") is None
