"""Parts of `benchmarks.on_gpu` about attention inside samples: its results beside fp64 on the host, and its rate."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.run import each, wait
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.training.attention import QUICK, Attention, Packed, results, sides
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.attention.kernel_choice import kernel_for
from vlmpipe.trainer.models.attention.kernels import BLOCKWISE, CPU, FLASH
from vlmpipe.trainer.models.hf.vision_attention import Pieces
from vlmpipe.trainer.models.hf.vision_attention import attention as of_tower

ATTENTION_PASSES = 5
TOWER_HEADS, TOWER_HEAD_DIM = 16, 80  # of Qwen2.5-VL
HEAD_DIMS = (32, 64, 72, 80, 96, 128, 256)  # 72: SigLIP, 80: the towers of Qwen-VL
NAMES = {CPU: "by sample", FLASH: "all samples at once", BLOCKWISE: "in plain products"}


def exactness(bench: Bench) -> None:
    """Output and gradients of the kernel that the trainer would choose, beside products in fp64 on the host."""
    types = (torch.bfloat16, torch.float32)
    cases = {f"heads of {dim}, {dtype}": (dim, dtype) for dim in HEAD_DIMS for dtype in types}
    for name, (dim, dtype) in each(bench, cases, 2):
        with bench.going_on(name):
            packed = Packed(1024, 7, heads=4, head_dim=dim)
            ours = sides(packed, bench.worker.device, dtype)["by sample"]
            found = results(ours)
            in_fp64 = sides(packed, torch.device("cpu"), torch.float64)["under a mask"]
            query, key, value = (each.detach().cpu().double().requires_grad_() for each in ours.inputs)
            exact = replace(in_fp64, inputs=(query, key, value), gradient=ours.gradient.cpu().double())
            apart = max(difference(one, other) for one, other in zip(found, results(exact), strict=True))
            kernel = NAMES[kernel_for(*ours.inputs[:2])]
            bench.report.figure("attention beside fp64: norm of the error", name, "share", Side(kernel, [apart]))


def difference(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().cpu().double() - exact).norm() / exact.norm())


def attention(bench: Bench) -> None:
    """Of packed sequences, with gradients: by sample, or under a mask; by the kernel that the trainer would choose."""
    device = bench.worker.device
    sequences = QUICK if bench.quick else (Packed(8192, 30, heads=16, head_dim=128), Packed(8192, 8, heads=32))
    cases = list(itertools.product(sequences, (torch.bfloat16, torch.float32)))
    bench.expect(len(cases))
    for packed, dtype in cases:
        both = sides(packed, device, dtype)
        query, key, _ = both["by sample"].inputs
        timed = {name: partial(passes_per_s, side, bench.worker) for name, side in both.items()}
        data = f"{packed.text()}, {dtype}"
        found = bench.take_turns(data, timed)
        ours = Side(NAMES[kernel_for(query, key)], found["by sample"])
        masked = Side("under a mask", found["under a mask"])
        bench.report.compare("attention: forward and backward", data, "1 / s", ours, masked)


def windows(bench: Bench) -> None:
    """Attention of Qwen2.5-VL's tower over one image of a megapixel, with gradients: windows, and the whole image."""
    side = 24 if bench.quick else 72  # patches
    shape = (1, TOWER_HEADS, side**2, TOWER_HEAD_DIM)
    for name, piece in (("windows of 64 patches", 64), ("the whole image", side**2)):
        pieces = Pieces.of(range(0, side**2 + 1, piece), bench.worker.device)
        tensors = [
            torch.randn(shape, device=bench.worker.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        ]
        timed = {
            "ours": partial(layers_per_s, ours, tensors, pieces, bench.worker),
            "library": partial(layers_per_s, by_the_library, tensors, pieces, bench.worker),
        }
        found = bench.take_turns(name, timed)
        sides = Side("by piece", found["ours"]), Side("the library's calls", found["library"])
        bench.report.compare("a tower layer's attention: forward and backward", name, "1 / s", *sides)


Layer = Callable[[Sequence[Tensor], Pieces], Tensor]


def ours(tensors: Sequence[Tensor], pieces: Pieces) -> Tensor:
    query, key, value = tensors
    found, _ = of_tower(nn.Identity(), query, key, value, None, scaling=TOWER_HEAD_DIM**-0.5, cu_seq_lens_q=pieces)
    return found


def by_the_library(tensors: Sequence[Tensor], pieces: Pieces) -> Tensor:
    """One call for each piece, as transformers does without the package flash-attn."""
    lengths = [tokens for _, tokens, count in pieces.runs for _ in range(count)]
    cut = zip(*(each.split(lengths, dim=2) for each in tensors), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*own).transpose(1, 2) for own in cut], dim=1)


def layers_per_s(layer: Layer, tensors: Sequence[Tensor], pieces: Pieces, worker: ProcessContext) -> float:
    wait(worker)
    started_s = time.perf_counter()
    for _ in range(ATTENTION_PASSES):
        torch.autograd.grad(layer(tensors, pieces).sum(), tensors)
    wait(worker)
    return ATTENTION_PASSES / (time.perf_counter() - started_s)


def passes_per_s(side: Attention, worker: ProcessContext) -> float:
    wait(worker)
    started_s = time.perf_counter()
    for _ in range(ATTENTION_PASSES):
        results(side)
    wait(worker)
    return ATTENTION_PASSES / (time.perf_counter() - started_s)
