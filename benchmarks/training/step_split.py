"""Part `split`: what a training step's CPU time is spent on, and its rate beside that of its matrix products alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.workloads import Workload
from benchmarks.training.compiled_steps import compiling_anew, with_compile
from benchmarks.training.products import MATRIX_PRODUCTS, Products
from benchmarks.training.ready_steps import WARM_UP, SteadySteps, packed_steps
from benchmarks.training.workloads import train_workloads
from vlmpipe.trainer.cpu_products import use_default_products, use_fastest_products

Measure = TypeVar("Measure")
ATTENTION = "vlmpipe::attend"  # begins the names of the operator and of its gradient, in which kernels run
KERNELS, AROUND_KERNELS = "attention kernels", "around attention kernels"
OTHER = "Python, dispatch, other operators"
# By names of operators; the first kind that fits.
KINDS = {
    "matrix products": ("mm", "addmm", "addmm_", "bmm", "baddbmm", "convolution", "mkldnn_convolution"),
    "sums and norms": ("sum", "mean", "linalg_vector_norm", "native_layer_norm", "native_layer_norm_backward", "amax"),
    "element-wise": (
        "mul", "mul_", "add", "add_", "sub", "sub_", "div", "div_", "neg", "pow", "rsqrt", "silu", "silu_backward",
        "gelu", "gelu_backward", "sigmoid", "exp", "exp_", "log", "cos", "sin", "addcmul", "addcmul_",
    ),
    "copies and fills": ("copy_", "cat", "fill_", "zero_", "index", "index_put_", "_index_put_impl_", "gather",
        "index_select", "index_add_", "embedding_dense_backward"),
    "optimizer": ("_fused_adamw_",),
}  # fmt: skip
ALL_KINDS = [*KINDS, KERNELS, AROUND_KERNELS, OTHER]
NOTE = (
    "Split: of one thread, by torch's profiler, as a share of the step's time; the profiler slows small operators. The "
    "rate of a step is its FLOPs, counted by torch's counter with the whole square of a sample for its attention, per "
    "CPU second, without the profiler, with layers compiled (train.compile: on) and not. Its products alone are the "
    "same matrix products (shapes, strides, number) on matrices of their own, one after another."
)


CACHED = {"digits": (True,), "easy-vqa, wide tower": (True, False)}  # by workload


def split(bench: Bench) -> None:
    """Steps with cached features, and with a wide tower that runs online."""
    runs = [(load, cached) for load in train_workloads(bench) for cached in CACHED[load.name]]
    bench.expect(len(runs))
    with one_thread():
        for load, cached in runs:
            of_workload(bench, load, cached=cached)
    bench.report.note(NOTE)


def of_workload(bench: Bench, load: Workload, *, cached: bool) -> None:
    data = f"{load.name}, {'cached features' if cached else 'tower online'}"
    ready = packed_steps(load, WARM_UP + 1, cached=cached)
    job = with_compile(load.cached if cached else load.online, on=False)
    steps = SteadySteps(job, bench.worker, ready)
    with FlopCounterMode(display=False) as counter, Products(MATRIX_PRODUCTS) as products:
        steps()
    flops = counter.get_total_flops()

    def rate(measured: SteadySteps) -> float:
        return flops / 1e9 / measured().cpu_s

    def rate_alone() -> float:
        return 1 / products.alone().cpu_per_unit

    with compiling_anew(bench, data):
        compiled = SteadySteps(with_compile(job, on=True), bench.worker, ready)
        sides: dict[str, Callable[[], Any]] = {
            "the step": lambda: rate(steps),
            "the step, compiled": lambda: rate(compiled),
            "alone": rate_alone,
            "alone by MKL": lambda: by_mkl(rate_alone),
            "shares": lambda: shares(steps),
        }
        found = bench.take_turns(data, sides)
    for name in ("the step", "the step, compiled"):
        rates = Side(name, found[name]), Side("its matrix products alone", found["alone"])
        bench.report.compare("rate of a step or of its products", data, "GFLOP / CPU s", *rates)
    sides_alone = Side("as a job multiplies", found["alone"]), Side("by MKL", found["alone by MKL"])
    bench.report.compare("rate of a step's products alone", data, "GFLOP / CPU s", *sides_alone)
    for kind in ALL_KINDS:
        values = [100 * each[kind] for each in found["shares"]]
        bench.report.figure("split of a step", data, "% of its time", Side(kind, values))


def by_mkl(measure: Callable[[], Measure]) -> Measure:
    """What `measure` finds while torch multiplies as it does by default."""
    use_default_products()
    try:
        return measure()
    finally:
        use_fastest_products()


def shares(steps: SteadySteps) -> dict[str, float]:
    """Of each kind of work in the time of one profiled step."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        wall_s = steps().wall_s
    found = dict.fromkeys(ALL_KINDS, 0.0)
    for event in profiler.events():
        found[kind_of(event)] += event.self_cpu_time_total / 1e6 / wall_s
    found[OTHER] += 1 - sum(found.values())  # outside of operators
    return found


def kind_of(event: Any) -> str:
    if "flash_attention" in event.name:
        return KERNELS
    if any(ATTENTION in each.name for each in with_parents(event)):
        return AROUND_KERNELS
    name = event.name.removeprefix("aten::")
    return next((kind for kind, names in KINDS.items() if name in names), OTHER)


def with_parents(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
