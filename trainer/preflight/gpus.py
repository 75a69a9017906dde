"""Looks at a machine's GPUs in a process of its own: prints, as JSON, what torch sees and whether each GPU computes.

    python -m vlmpipe.trainer.preflight.gpus

A process of its own, because a CUDA context takes GPU memory until its process ends, and a GPU that hangs can be
given up (`look`).
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.preflight.nvml import devices, driver_version

if TYPE_CHECKING:
    import torch

COMMAND = (sys.executable, "-m", "vlmpipe.trainer.preflight.gpus")
# torch's CUDA libraries, gigabytes, are read from a cold disk, and a driver starts eight GPUs one after another. A
# machine without GPUs answers at once, so a long limit costs something only where the driver hangs.
LOOK_TIMEOUT_S = 300.0
KILL_S = 5.0  # a process that waits for a driver in the kernel outlives SIGKILL, and is left behind
ANY_PROGRAM = "--any-program"
DEVICE_FILES = "/dev/nvidia[0-9]*"
# A product of small whole numbers is exact in every precision that a GPU may choose for fp32 (TF32 has 11 bits).
CHECK_SIZE = 1024
ROW_VALUES, COLUMN_VALUES = 7, 5
RATE_SIZE, RATE_PRODUCTS = 8192, 32  # a product of 2 * 8192^3 FLOPs takes a millisecond on an H100


@dataclass(frozen=True)
class FoundGpu:
    """One GPU as torch describes it. `fault` says why it does not compute; empty for one that does."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    fault: str = ""
    tflops: float | None = None  # of bf16 products (fp16 below compute capability 8.0); measured on request only


@dataclass(frozen=True)
class FoundGpus:
    """A machine's GPUs.

    Attributes:
        torch: its version; empty in an image without torch.
        cuda: version of CUDA that the installed torch is built for; empty for a CPU build.
        nccl: version of NCCL in the installed torch, as 2.29.7; empty without.
        arch_list: architectures that torch has code for, such as sm_90 and compute_120.
        driver: version of NVIDIA's driver; empty where none is found.
        reason: torch's own words for seeing no GPU.
    """

    torch: str
    cuda: str
    nccl: str
    arch_list: tuple[str, ...]
    driver: str
    reason: str
    gpus: tuple[FoundGpu, ...]

    @classmethod
    def parse(cls, text: str) -> FoundGpus:
        """From the JSON of `main`."""
        content = json.loads(text)
        gpus = tuple(FoundGpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in content.pop("gpus"))
        return cls(**{**content, "arch_list": tuple(content["arch_list"])}, gpus=gpus)


class Cuda(Protocol):
    """The functions of torch.cuda that are called."""

    def versions(self) -> tuple[str, str, str]:
        """Return the versions of torch, its CUDA and its NCCL; empty for a part that torch lacks."""
        ...

    def arch_list(self) -> Sequence[str]: ...

    def count(self) -> int: ...

    def start(self) -> None:
        """Raise torch's own error where CUDA cannot be used."""
        ...

    def properties(self, index: int) -> tuple[str, int, tuple[int, int]]:
        """Name, memory in bytes and compute capability."""
        ...

    def device(self, index: int) -> torch.device: ...

    def product(self, index: int, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Multiply two CPU matrices on GPU `index` and return the product on the CPU."""
        ...

    def synchronize(self, index: int) -> None: ...


class TorchCuda:
    """torch.cuda of this process."""

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def versions(self) -> tuple[str, str, str]:
        torch = self._torch
        nccl = torch.cuda.nccl.version() if torch.version.cuda else ()
        return torch.__version__, torch.version.cuda or "", ".".join(map(str, nccl))

    def arch_list(self) -> Sequence[str]:
        return self._torch.cuda.get_arch_list()

    def count(self) -> int:
        return self._torch.cuda.device_count() if self._torch.cuda.is_available() else 0

    def start(self) -> None:
        self._torch.cuda.init()

    def properties(self, index: int) -> tuple[str, int, tuple[int, int]]:
        device = self._torch.cuda.get_device_properties(index)
        return device.name, device.total_memory, (device.major, device.minor)

    def device(self, index: int) -> torch.device:
        return self._torch.device("cuda", index)

    def product(self, index: int, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        device = self.device(index)
        return (left.to(device) @ right.to(device)).cpu()

    def synchronize(self, index: int) -> None:
        self._torch.cuda.synchronize(index)


def examine(cuda: Cuda, *, rates: bool = False, driver: str = "") -> FoundGpus:
    """GPUs that torch sees, with a product on each. rates: measure how fast it multiplies large matrices, too."""
    version, of_cuda, nccl = cuda.versions()
    with warnings.catch_warnings(record=True) as warned:  # torch warns, and does not raise, where the driver is too old
        warnings.simplefilter("always")
        count = cuda.count()
    reason = "" if count else _why_none(cuda, [str(warning.message) for warning in warned])
    gpus = tuple(_examined(cuda, index, rates=rates) for index in range(count))
    return FoundGpus(version, of_cuda, nccl, tuple(cuda.arch_list()), driver, reason, gpus)


def _why_none(cuda: Cuda, warned: list[str]) -> str:
    try:
        cuda.start()
    except (RuntimeError, AssertionError) as error:  # a CPU build of torch asserts
        return _first_line(str(error))
    return _first_line(" ".join(warned)) or "torch.cuda.device_count() is 0"


def _examined(cuda: Cuda, index: int, *, rates: bool) -> FoundGpu:
    name, memory_bytes, capability = cuda.properties(index)
    try:
        fault = "" if _multiplies(cuda, index) else "a matrix product came out wrong"
        tflops = _tflops(cuda, index, capability) if rates and not fault else None
    except RuntimeError as error:  # such as "no kernel image is available for execution on the device"
        return FoundGpu(name, memory_bytes, capability, _first_line(str(error)))
    return FoundGpu(name, memory_bytes, capability, fault, tflops)


def _multiplies(cuda: Cuda, index: int) -> bool:
    """Return whether a product on the GPU is that of this machine's CPU."""
    import torch

    numbers = torch.arange(CHECK_SIZE * CHECK_SIZE)
    left = (numbers % ROW_VALUES).reshape(CHECK_SIZE, CHECK_SIZE).float()
    right = (numbers % COLUMN_VALUES).reshape(CHECK_SIZE, CHECK_SIZE).float()
    return torch.equal(cuda.product(index, left, right), left @ right)


def _tflops(cuda: Cuda, index: int, capability: tuple[int, int]) -> float:
    """10^12 floating-point operations a second of large products in the type that training computes in."""
    import torch

    dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16
    size = RATE_SIZE if cuda.device(index).type == "cuda" else CHECK_SIZE
    matrix = torch.ones((size, size), dtype=dtype, device=cuda.device(index))
    out = torch.empty_like(matrix)
    torch.mm(matrix, matrix, out=out)  # the first one loads kernels
    cuda.synchronize(index)
    products = RATE_PRODUCTS if size == RATE_SIZE else 1
    began_s = time.perf_counter()
    for _ in range(products):
        torch.mm(matrix, matrix, out=out)
    cuda.synchronize(index)
    return 2 * size**3 * products / (time.perf_counter() - began_s) / 1e12


def without_torch() -> FoundGpus:
    """Where torch does not compute, as in the image of a TensorFlow program: what NVIDIA's library lists, uncomputed.

    Where that is not here either, device files are counted, and nothing else is known of the GPUs.
    """
    listed = devices()
    if listed is None:
        listed = [("", 0, (0, 0))] * len(glob.glob(DEVICE_FILES))
    reason = "" if listed else f"neither NVIDIA's library nor {DEVICE_FILES} names one"
    return FoundGpus("", "", "", (), driver_version(), reason, tuple(FoundGpu(*gpu) for gpu in listed))


def look(
    *,
    rates: bool = False,
    any_program: bool = False,
    command: Sequence[str] = COMMAND,
    timeout_s: float = LOOK_TIMEOUT_S,
) -> FoundGpus:
    """Result of `main` in a process of its own.

    any_program: of an image whose program may compute by another library than torch.

    Raises UserError (78) where it does not answer in time, or dies: a driver or a GPU that hangs does that.
    """
    words = [*command, *(["--rates"] if rates else []), *([ANY_PROGRAM] if any_program else [])]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace"
    )
    try:
        answer, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # not subprocess.run, which waits without a limit
            process.wait(KILL_S)
        raise UserError(
            f"the GPUs did not answer within {timeout_s:g} s",
            expected="a matrix product on each",
            fix="start the job again, on another machine: a GPU or its driver hangs here",
            code=ExitCode.MACHINE,
        ) from error
    if process.returncode:
        print(errors, file=sys.stderr, flush=True)
        last = (errors.strip().splitlines() or ["nothing printed"])[-1]
        raise UserError(
            f"looking at the GPUs ended with code {process.returncode}: {last[:300]}",
            expected="a matrix product on each GPU",
            fix="the lines above are its own; if they name the driver or a GPU, start the job on another machine",
            code=ExitCode.MACHINE,
        )
    return FoundGpus.parse(answer.strip().splitlines()[-1])


def main(arguments: Sequence[str], cuda: Cuda | None = None) -> int:
    """Print the findings as the last line of stdout."""
    if cuda is None and importlib.util.find_spec("torch"):
        cuda = TorchCuda()
    if cuda is None or (ANY_PROGRAM in arguments and not cuda.versions()[1]):
        result = without_torch()
    else:
        result = examine(cuda, rates="--rates" in arguments, driver=driver_version())
    print(json.dumps(asdict(result)), flush=True)
    return 0


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # a broken driver may crash a process at its exit, after all is known
