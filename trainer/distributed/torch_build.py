"""The installed build of torch, found without a GPU.

    python -m vlmpipe.trainer.distributed.torch_build --build cu130 --min-driver 580 --min-compute-capability 7.5

ends with 69 unless that build is installed and these are what it needs. The images' recipes call it, for their labels.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch

from vlmpipe.trainer.distributed.cuda_builds import CPU, architectures_of, min_driver
from vlmpipe.trainer.errors import ExitCode, UserError, run_main


@dataclass(frozen=True)
class TorchBuild:
    """An installed build of torch."""

    name: str  # "cu130", or "cpu"
    cuda: str | None  # "13.0"; None for CPUs
    architectures: tuple[float, ...]  # compute capabilities that it has machine code for

    @property
    def min_driver(self) -> str:
        """The oldest branch of the driver that runs it; empty for CPUs and for an unknown CUDA version."""
        return (self.cuda and min_driver(self.cuda)) or ""

    @property
    def min_compute_capability(self) -> str:
        """The lowest compute capability that the build has code for; empty for a build for CPUs."""
        return f"{min(self.architectures):.1f}" if self.architectures else ""


def installed_build() -> TorchBuild:
    """The build that is installed here."""
    cuda = torch.version.cuda
    if cuda is None:
        return TorchBuild(CPU, None, ())
    flags = torch._C._cuda_getArchFlags()  # torch.cuda.get_arch_list() is empty where there is no GPU
    return TorchBuild(f"cu{cuda.replace('.', '')}", cuda, architectures_of((flags or "").split()))


def main() -> int:
    """Compare the installed build with the expected one, and print the result."""
    parser = argparse.ArgumentParser(prog="python -m vlmpipe.trainer.distributed.torch_build", description=__doc__)
    parser.add_argument("--build", required=True)
    parser.add_argument("--min-driver", default="")
    parser.add_argument("--min-compute-capability", default="")
    options = parser.parse_args()
    expected = (options.build, options.min_driver, options.min_compute_capability)
    require(installed_build(), *expected)
    print(f"torch {torch.__version__}: {_text(*expected)}")
    return ExitCode.OK


def require(present: TorchBuild, build: str, min_driver: str, min_compute_capability: str) -> None:
    """Raise UserError (69) unless torch is that build, with these needs."""
    if (present.name, present.min_driver, present.min_compute_capability) != (
        build,
        min_driver,
        min_compute_capability,
    ):
        raise UserError(
            f"torch {torch.__version__} is {_text(present.name, present.min_driver, present.min_compute_capability)}",
            expected=_text(build, min_driver, min_compute_capability),
            fix=f"install torch from an index that has its build {build}, with the versions of "
            f"container/torch_builds/{build}.txt; a build is described in trainer/distributed/cuda_builds.yaml",
            code=ExitCode.UNAVAILABLE,
        )


def _text(build: str, min_driver: str, min_compute_capability: str) -> str:
    if build == CPU:
        return "the build for CPUs"
    return (
        f"the build {build}, for drivers from {min_driver or '?'} on and compute capabilities from "
        f"{min_compute_capability or '?'} on"
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
