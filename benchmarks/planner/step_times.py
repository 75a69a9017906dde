"""Part `steps`: the planner's step times on a device like this processor, beside real steps of small models."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.support.suite import Bench
from benchmarks.support.timing import Clock, Measured
from benchmarks.support.tiny_run import TinyRun
from tests.support.trainer.memory_cases import CHECKPOINTING, ONLINE, PROJECTOR, TOWER_TRAINED, Case
from vlmpipe.catalog.machines import Gpu, load_catalog
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.step_time import estimate_time
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape

Rounds = list[tuple[Measured, Measured]]  # forward and backward pass, and update

NOTE = (
    "Step time: the rates of this processor are taken from one configuration, and the others are predicted from it by "
    "the planner's own functions. That checks whether time grows with width, depth, sequences and passes as the "
    "planner says. It says nothing about the rate of a GPU, or about communication."
)


def _sizes(section: str, hidden: int, inner: int, layers: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {f"model.{section}.config.{name}": size for name, size in sizes.items()}


SIZES: dict[str, Any] = {
    **_sizes("tower", 256, 1024, 6),
    **_sizes("language_model", 512, 1376, 4),
    "model.tower.config.image_size": 64,
    "model.image_size": 64,
    "train.clip_grad_norm": 1.0,
    "train.deterministic": False,
}


def _case(changes: dict[str, Any] | None = None, rows: SequenceShape | None = None) -> Case:
    """One micro-batch a step."""
    changes, rows = SIZES | (changes or {}), rows or SequenceShape(2, 256, 4, 192)
    return Case("ddp", changes, passes=1, cached=changes.get("features.cache") != "off", rows=rows)


CALIBRATION = "the one that calibrates"
QUICK_CASES = 3
CASES = {
    CALIBRATION: _case(),
    "wider": _case(_sizes("language_model", 768, 2048, 4)),
    "deeper": _case(_sizes("language_model", 512, 1376, 8)),
    "longer sequences": _case(rows=SequenceShape(2, 512, 4, 384)),
    "more sequences": _case(rows=SequenceShape(4, 256, 8, 384)),
    "tower online": _case(ONLINE),
    "tower online, more images": _case(ONLINE, SequenceShape(2, 256, 6, 64)),
    "tower trained": _case(TOWER_TRAINED),
    "activation checkpointing": _case(CHECKPOINTING),
    "language model frozen": _case(PROJECTOR),
}


@dataclass(frozen=True)
class StepSeconds:
    """Of one step: forward and backward pass, and the update with clipping."""

    compute: float
    update: float

    @property
    def total(self) -> float:
        return self.compute + self.update


def timed_step(run: TinyRun) -> tuple[Measured, Measured]:
    clock = Clock()
    run.strategy.forward_backward(run.batches, run.label_tokens)
    compute, clock = clock.stop(1), Clock()
    run.strategy.step(1.0)
    return compute, clock.stop(1)


def medians(rounds: Rounds) -> StepSeconds:
    """CPU seconds."""
    return StepSeconds(*(statistics.median(each.cpu_s for each in side) for side in zip(*rounds, strict=True)))


def times_calibration(rounds: Rounds, calibration: Rounds) -> float:
    """How often as long as the calibrating step: the median of the rounds' own ratios, as a slow one weighs on both."""
    totals = [[compute.cpu_s + update.cpu_s for compute, update in side] for side in (rounds, calibration)]
    return statistics.median(mine / other for mine, other in zip(*totals, strict=True))


def planned(case: Case, device: Gpu) -> StepSeconds:
    """The planner's parts of the same step, without waiting for data and saving: nothing is read or saved here."""
    config = case.config(1)
    shape = family_of(config.model).shape(config.model)
    rows = case.rows
    load = Workload(
        sequences_per_step=rows.sequences,
        sequence_length=rows.tokens,
        fill=1.0,
        samples_per_sequence=2,
        sample_pairs_per_sequence=rows.tokens**2 / 2,
        images_per_sequence=rows.images / rows.sequences,
        label_tokens_per_sequence=rows.label_tokens / rows.sequences,
        sequences_per_epoch=None,
        steps=None,
        samples=None,
        epochs=1,
        origin="",
    )
    machine = load_catalog().machines[config.cluster.machine_type]
    time = estimate_time(Scenario(config, shape, layout_of(config), load, machine, device, cached=case.cached))
    parts = {part.name: part.s for part in time.parts}
    return StepSeconds(parts["computing"], parts["optimizer update"])


def device_like(measured: StepSeconds) -> Gpu:
    """A device on which the planner's time of the calibrating case is exactly what was measured."""
    unit = replace(load_catalog().gpus["NVIDIA_TESLA_T4"], fp32_tflops=1.0, memory_gbytes_per_s=1.0)
    of_unit = planned(CASES[CALIBRATION], unit)
    return replace(
        unit, fp32_tflops=of_unit.compute / measured.compute, memory_gbytes_per_s=of_unit.update / measured.update
    )


def steps(bench: Bench) -> None:
    """One configuration gives the rates; the others are predicted from them. CPU time, sides in turn."""
    names = list(CASES)[: QUICK_CASES if bench.quick else None]
    sides = {}
    for name in names:
        bench.at(f"building {name}")
        sides[name] = partial(timed_step, TinyRun(CASES[name], bench.worker))
    found = bench.take_turns("a step of each", sides)
    calibration = found[CALIBRATION]
    known = medians(calibration)
    device = device_like(known)
    for name in names:
        if name != CALIBRATION:
            predicted_s = planned(CASES[name], device).total
            measured_s = known.total * times_calibration(found[name], calibration)
            bench.report.predict("step time", name, "CPU ms", 1000 * predicted_s, 1000 * measured_s)
    bench.report.note(NOTE)
    bench.report.note(
        f"Step times are calibrated by a step of {1000 * known.compute:.0f} CPU ms of computing and "
        f"{1000 * known.update:.0f} of updating; measured is the median of each round's ratio to it."
    )
