"""Choice of a device's attention kernel: the fastest one that agrees with plain products there.

Compilers of kernels have made wrong gradients on some GPUs without an error, so a kernel is tried before it is used,
also with prefixes that samples share where there are any.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.kernels import BLOCKWISE, CPU, FLASH, Kernel, VarlenArgs
from vlmpipe.trainer.models.attention.merged_parts import with_prefixes

MAX_FLASH_HEAD_DIM = 256  # of torch's flash kernels, which also take multiples of 8 only
MIN_FLASH_CAPABILITY = (8, 0)
TRIAL_WINDOW = 40  # tokens
TRIAL_TOLERANCE = 0.02  # of the largest number; two kernels in bf16 or fp16 differ by some 0.005
LENGTHS, TOKENS = [[3, 130, 1], [64, 65]], 144  # of the samples in a trial
# The prefixes of a trial, in a sequence of their own each: a long one with two branches, and a short one around another
# one with two.
SHARED_LENGTHS, SHARED = [[90, 30, 14], [5, 20, 60, 51]], [[(0, 90, 134)], [(0, 5, 136), (5, 25, 136)]]


def kernel_for(query: Tensor, key: Tensor, window: int = 0, *, shared: bool = False) -> Kernel:
    """The fastest kernel that is known to be correct for such tensors.

    window: see `VarlenArgs`. shared: samples share prefixes.
    """
    if query.device.type == "cpu":
        return CPU
    if query.device.type == "cuda" and flash_takes(query) and is_right(FLASH, query, key, window, shared=shared):
        return FLASH
    return BLOCKWISE


def is_right(kernel: Kernel, query: Tensor, key: Tensor, window: int = 0, *, shared: bool = False) -> bool:
    """Return whether `kernel` agrees with plain products on a few short samples; warns if not.

    Tried once for each shape of heads, type and device, with windows, and with shared prefixes.
    """
    trial_window = TRIAL_WINDOW if window else 0
    shape = (query.shape[2], key.shape[2], query.shape[3])
    return _is_right(kernel, query.device, query.dtype, *shape, trial_window, shared)


@functools.cache
def _is_right(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    shared: bool,
) -> bool:
    lengths = SHARED_LENGTHS if shared else LENGTHS
    samples = CuSeqlens.of(lengths, TOKENS, SHARED if shared else ()).to(device)
    args = VarlenArgs(samples.bounds, samples.device_bounds, head_dim**-0.5, window)
    noise = torch.Generator(device).manual_seed(0)  # leaves the run's own random numbers alone
    query, gradient, key, value = (
        torch.randn(len(lengths), TOKENS, count, head_dim, generator=noise, device=device).to(dtype)
        for count in (heads, heads, kv_heads, kv_heads)
    )

    in_sample = torch.cat([torch.arange(TOKENS, device=device) < sum(samples_in) for samples_in in lengths])

    def results(tried: Kernel) -> list[Tensor]:
        """Return output and gradients at tokens of samples. Kernels may differ in padding, which has no loss."""
        tried = with_prefixes(tried, samples.prefixes, device)
        output, lse = tried.forward(query, key, value, args)
        tensors = [output, *tried.backward(gradient, query, key, value, output, lse, args)]
        return [result.flatten(0, 1)[in_sample] for result in tensors]

    if not (problem := disagreement(lambda: results(kernel), lambda: results(BLOCKWISE))):
        return True
    with_shared = " with shared prefixes" if shared else ""
    warnings.warn(
        f"torch's flash attention of samples{with_shared} is not used for {heads} heads of {head_dim} in {dtype} on "
        f"{device}: {problem}. Plain products are, which take longer.",
        stacklevel=2,
    )
    return False


def disagreement(tried: Callable[[], list[Tensor]], plain: Callable[[], list[Tensor]]) -> str:
    """Why the results of a kernel are not those of plain products; empty where they are.

    Its error is a reason too, also of a torch with another signature.
    """
    try:
        pairs = zip(tried(), plain(), strict=True)
        apart = float(torch.stack([(ours - other).abs().max() / other.abs().max() for ours, other in pairs]).max())
    except torch.OutOfMemoryError:  # no verdict on the kernel
        raise
    except (RuntimeError, TypeError, ImportError) as error:
        return str(error).splitlines()[0]
    if apart <= TRIAL_TOLERANCE:  # false for NaN
        return ""
    return f"its results differ from those of plain products by {apart:.2g} of the largest number"


def flash_takes(query: Tensor) -> bool:
    """Return whether torch's flash kernels have code for such heads on this GPU. query: (..., head_dim)."""
    head_dim = query.shape[-1]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= MAX_FLASH_HEAD_DIM
        and torch.cuda.get_device_capability(query.device) >= MIN_FLASH_CAPABILITY
    )
