"""Matrix products in fp32 on processors on which MKL, torch's default, does not use all of their vector width.

On AMD's processors with AVX-512, MKL multiplies at the rate of AVX2, about half of that of oneDNN, which torch has too
(decision 0021). Other processors keep MKL: nothing was measured there.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

CPU_INFO = Path("/proc/cpuinfo")
AMD = "AuthenticAMD"
MIN_MULTIPLICATIONS = 1 << 22  # of a product; a smaller one costs less than oneDNN's choice of a kernel
MIN_SIDE = 16  # rows, columns and inner length; thinner products wait for memory, whoever multiplies

aten = torch.ops.aten
_REGISTERED: list[torch.library.Library] = []  # a library that is collected takes its kernels along


def use_fastest_products() -> bool:
    """Have this process multiply by oneDNN where that is faster. Returns whether it does.

    Which one is used depends on the processor and the sizes, never on a measurement: runs and restarts on processors
    of one kind round in the same way.
    """
    if _REGISTERED or not prefers_onednn():
        return bool(_REGISTERED)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*[Oo]verrid", UserWarning)  # torch says once that it does what it is asked
        for name, kernel in (("mm", mm), ("mm.out", mm_out), ("addmm", addmm), ("addmm_", addmm_)):
            library.impl(name, kernel, "CPU", allow_override=True)
    _REGISTERED.append(library)
    return True


def use_default_products() -> None:
    """Multiply as torch does by default again."""
    while _REGISTERED:
        _REGISTERED.pop()._destroy()


def prefers_onednn() -> bool:
    """Return whether this processor's fp32 products are faster by oneDNN."""
    is_here = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    return is_here and torch.backends.cpu.get_cpu_capability() == "AVX512" and vendor() == AMD


def vendor() -> str:
    """The processor's maker as Linux names it; empty elsewhere."""
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def takes(left: Tensor, right: Tensor) -> bool:
    """Return whether oneDNN multiplies these: fp32 matrices, (rows, inner) and (inner, columns), that are large
    enough.
    """
    if not left.dtype == right.dtype == torch.float32 or not left.ndim == right.ndim == 2:
        return False
    rows, inner, columns = *left.shape, right.shape[1]
    fits = inner == right.shape[0]  # otherwise torch's own kernel says what is wrong
    return fits and min(rows, inner, columns) >= MIN_SIDE and rows * inner * columns >= MIN_MULTIPLICATIONS


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """`left @ right` by oneDNN, plus `bias`, (columns,)."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
    return result


def mm(left: Tensor, right: Tensor) -> Tensor:
    """`aten::mm`."""
    return product(left, right) if takes(left, right) else addmm(left.new_empty(()), left, right, beta=0)


def mm_out(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    """`aten::mm.out`, which compiled layers call."""
    if takes(left, right) and out.dtype == torch.float32 and out.shape == (left.shape[0], right.shape[1]):
        return out.copy_(product(left, right))
    result: Tensor = aten.addmm.out(out.new_empty((), dtype=left.dtype), left, right, beta=0, out=out)
    return result


def addmm(added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`aten::addmm`, of which a bias of fp32 is oneDNN's. It reads one as if its numbers lay side by side."""
    is_bias = added.ndim == 1 and added.shape == right.shape[1:] and added.dtype == torch.float32
    is_bias = is_bias and added.is_contiguous()
    if is_bias and beta == alpha == 1 and takes(left, right):
        return product(left, right, added)
    result: Tensor = aten.addmm.out(added, left, right, beta=beta, alpha=alpha, out=left.new_empty(0))
    return result


def addmm_(total: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`aten::addmm_`."""
    fits = total.dtype == torch.float32 and total.shape == (left.shape[0], right.shape[-1])
    if fits and beta == alpha == 1 and takes(left, right):
        return total.add_(product(left, right))
    result: Tensor = aten.addmm.out(total, left, right, beta=beta, alpha=alpha, out=total)
    return result
