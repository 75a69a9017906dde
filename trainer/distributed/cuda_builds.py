"""CUDA builds of torch: which GPUs they have code for, and which drivers run them.

The facts are in `cuda_builds.yaml`, each with its source. Imports no torch: the command line reads them too.

    python -m vlmpipe.trainer.distributed.cuda_builds cu130

prints a build and its needs as NAME=VALUE words, for container/build.sh.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vlmpipe.trainer.errors import ConfigError, ExitCode, run_main

CPU = "cpu"  # the build of torch without CUDA


@dataclass(frozen=True)
class CudaBuild:
    """A CUDA build of torch."""

    name: str  # "cu130", what stands after the plus of torch's version
    version: str  # "13.0", as torch.version.cuda
    architectures: tuple[float, ...]  # compute capabilities with machine code in the build
    min_driver: str  # "580": the oldest branch of the driver that runs it

    @property
    def min_compute_capability(self) -> float:
        """The lowest compute capability that the build has code for."""
        return min(self.architectures)

    def has_code_for(self, compute_capability: float) -> bool:
        """Return whether a GPU of this compute capability can run the build."""
        return has_code_for(self.architectures, compute_capability)


def has_code_for(architectures: Iterable[float], compute_capability: float) -> bool:
    """Return whether a GPU can run machine code for one of the architectures.

    Code for X.Y runs on GPUs X.Z with Z >= Y, and on no other major version (CUDA C++ Programming Guide, "Binary
    compatibility").
    """
    major, minor = _major_minor(compute_capability)
    known = [_major_minor(architecture) for architecture in architectures]
    return any(built_major == major and built_minor <= minor for built_major, built_minor in known)


def architectures_of(names: Iterable[str]) -> tuple[float, ...]:
    """Compute capabilities from torch.cuda.get_arch_list(): sm_86 is 8.6, sm_120 is 12.0. PTX is left out."""
    matches = (re.fullmatch(r"sm_(\d+)(\d)[af]?", name) for name in names)
    return tuple(float(f"{match[1]}.{match[2]}") for match in matches if match)


def min_driver(cuda_version: str) -> str | None:
    """The oldest branch of NVIDIA's Linux driver that runs a CUDA version ("13.0"); None for an unknown one."""
    return _facts()["min_drivers"]["by_cuda_major"].get(cuda_version.partition(".")[0])


def driver_runs(driver: str, cuda_version: str) -> bool | None:
    """Return whether a driver ("570.86.15") runs a CUDA version ("13.0"); None where that is not known."""
    needed = min_driver(cuda_version)
    return None if needed is None else _numbers(driver) >= _numbers(needed)


@functools.cache
def cuda_builds() -> Mapping[str, CudaBuild]:
    """The known builds by name."""
    builds = {}
    for name, build in _facts()["builds"].items():
        driver = min_driver(build["cuda"])
        assert driver, f"cuda_builds.yaml has no driver for CUDA {build['cuda']}"
        builds[name] = CudaBuild(name, build["cuda"], tuple(build["architectures"]), driver)
    return builds


def main() -> int:
    """Print the build that is named and its needs. Raises UserError (64) for an unknown one."""
    parser = argparse.ArgumentParser(prog="python -m vlmpipe.trainer.distributed.cuda_builds", description=__doc__)
    parser.add_argument("build")
    name = parser.parse_args().build
    print(" ".join(f"{argument}={value}" for argument, value in build_arguments(name).items()))
    return ExitCode.OK


def build_arguments(name: str) -> dict[str, str]:
    """A build of torch, "cpu" too, and its needs as arguments of the images' recipes.

    Raises ConfigError for one that is not in `cuda_builds.yaml`.
    """
    if name == CPU:
        return {"TORCH_BUILD": name, "MIN_DRIVER": "", "MIN_COMPUTE_CAPABILITY": ""}
    build = cuda_builds().get(name)
    if build is None:
        raise ConfigError(
            f"nothing is known of torch's build {name}",
            expected=f"{CPU}, {' or '.join(cuda_builds())}",
            fix="describe it in trainer/distributed/cuda_builds.yaml",
        )
    capability = f"{build.min_compute_capability:.1f}"
    return {"TORCH_BUILD": name, "MIN_DRIVER": build.min_driver, "MIN_COMPUTE_CAPABILITY": capability}


@functools.cache
def _facts() -> Mapping[str, Any]:
    content: dict[str, object] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return content


def _major_minor(capability: float) -> tuple[int, int]:
    major, _, minor = f"{capability:.1f}".partition(".")
    return int(major), int(minor)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


if __name__ == "__main__":
    sys.exit(run_main(main))
