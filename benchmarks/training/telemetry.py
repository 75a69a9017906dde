"""Part `telemetry`: what timing every layer and reporting of ranks take of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import nn

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import clocked
from benchmarks.training.ready_steps import WARM_UP, SteadySteps, packed_steps
from benchmarks.training.workloads import train_workloads
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.monitoring.gpu_telemetry import NOTHING
from vlmpipe.trainer.monitoring.rank_metrics import ForwardTimer, RankMetrics, gather_rank_metrics, straggler

CALLS, REPORTS = 20_000, 500
MAX_PERCENT = 0.5  # of a step: the aim


def telemetry(bench: Bench) -> None:
    """The clock at every layer, as with `fsdp`, the strategy with the most of them, and a report after each step; runs
    report every few steps. Measured alone: a step varies by more from round to round than all of it takes."""
    for load in train_workloads(bench):
        layers: list[nn.Module] = []
        with mock.patch("vlmpipe.trainer.setup.strategy.waitless", _noting_layers(layers)):
            steps = SteadySteps(load.cached, bench.worker, packed_steps(load, WARM_UP + (2 if bench.quick else 12)))
        passes = len(layers) * len(steps.ready[0].batches)
        sides: dict[str, Callable[[], float]] = {
            "step": partial(_step_s, steps),
            "clock": _clock_s,
            "report": partial(_report_s, bench.worker),
        }
        found = bench.take_turns(load.name, sides)
        percent = [
            100 * (passes * clock + report) / step
            for step, clock, report in zip(found["step"], found["clock"], found["report"], strict=True)
        ]
        side = Side(f"{passes} timed passes of layers and a report", percent)
        bench.report.figure("telemetry as a share of a step", load.name, "% of CPU time", side)
    bench.report.note(
        f"Telemetry: the aim is at most {MAX_PERCENT} %. One process on a CPU: no gauges of a GPU, no CUDA events in "
        "the clock's place, and ranks have nobody to wait for."
    )


def _step_s(steps: SteadySteps) -> float:
    return steps().cpu_s / len(steps.ready)


def _clock_s() -> float:
    """CPU seconds that the clock adds to one pass of a module."""
    plain, timed = nn.Identity(), nn.Identity()
    ForwardTimer([timed], torch.device("cpu"))
    with_s, without_s = (clocked(partial(_called, module)).cpu_s for module in (timed, plain))
    return max(0.0, with_s - without_s) / CALLS


def _called(module: nn.Module) -> float:
    nothing = torch.zeros(())
    for _ in range(CALLS):
        module(nothing)
    return CALLS


def _report_s(worker: ProcessContext) -> float:
    before = RankMetrics.at_start(worker.world_size)

    def reported() -> float:
        for _ in range(REPORTS):
            ranks = gather_rank_metrics(worker, 0.0, 1.0, 0, NOTHING)
            straggler(before.forward_s, ranks.forward_s)
        return REPORTS

    return clocked(reported).cpu_per_unit


def _noting_layers(found: list[nn.Module]) -> Callable[..., list[nn.Module]]:
    def every_layer(_config: object, _module: nn.Module, units: ShardingUnits, *, compiled: bool) -> list[nn.Module]:
        found[:] = [*units.tower_layers, *units.language_layers]
        return []  # so that the steps are without

    return every_layer
