"""Real training steps of several small models, and the planner's time for them on a device like this processor."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from benchmarks.common import Clock, Measured
from tests.support.trainer.measure_memory import packed_batch
from tests.support.trainer.tiny_runs import TINY, merged
from trainer.distributed.process import ProcessContext
from trainer.models.layers.recompute_policy import Recompute
from trainer.models.registry import family_of
from trainer.strategies.registry import build_strategy
from trainer.tracing.fake_inputs import SequenceShape
from vlmpipe.catalog.machines import Gpu, load_catalog
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.time.step_time import estimate_time
from vlmpipe.planner.workload import Workload

Rounds = list[tuple[Measured, Measured]]  # forward and backward pass, and update

VOCABULARY = 300
SIZES: dict[str, Any] = {
    "model.tower.config": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6},
    "model.language_model.config": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4},
    "model.image_size": 64,
    "train.clip_grad_norm": 1.0,
    "train.deterministic": False,
}
ROWS = SequenceShape(2, 256, 4, 192)


@dataclass(frozen=True)
class StepCase:
    """One configuration: what differs from SIZES, and its rows, which make one micro-batch and one step."""

    changes: dict[str, Any] = field(default_factory=dict)
    rows: SequenceShape = ROWS

    def config(self) -> RunConfig:
        """The run file of this case."""
        content = TINY
        for dotted, value in (SIZES | self.changes).items():
            flat = (
                {f"{dotted}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {dotted: value}
            )
            content = merged(content, flat)
        rows = {
            "train.global_batch_size": self.rows.rows,
            "train.micro_batch_size": self.rows.rows,
            "data.sequence_length": self.rows.tokens,
            "data.max_images_per_sequence": self.rows.images // self.rows.rows,
        }
        return parse_run_config(merged(content, rows), "step case")


LANGUAGE = "model.language_model.config"
CALIBRATION = "the one that calibrates"
CASES = {
    CALIBRATION: StepCase(),
    "wider": StepCase({LANGUAGE: {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4}}),
    "deeper": StepCase({LANGUAGE: {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8}}),
    "longer rows": StepCase(rows=SequenceShape(2, 512, 4, 384)),
    "more rows": StepCase(rows=SequenceShape(4, 256, 8, 384)),
    "tower online": StepCase({"features.cache": "off"}),
    "tower online, more images": StepCase({"features.cache": "off"}, SequenceShape(2, 256, 6, 64)),
    "tower trained": StepCase({"features.cache": "off", "model.freeze": []}),
    "activation checkpointing": StepCase({"train.activation_checkpointing": "full"}),
    "language model frozen": StepCase({"model.freeze": ["tower", "language_model"]}),
}


@dataclass(frozen=True)
class StepSeconds:
    """Of one step: forward and backward pass, and the update with clipping."""

    compute: float
    update: float

    @property
    def total(self) -> float:
        return self.compute + self.update


class RealSteps:
    """A strategy with a batch that is ready; each call is one step, in CPU time of the process."""

    def __init__(self, case: StepCase, worker: ProcessContext) -> None:
        job = case.config()
        family, cached = family_of(job.model), job.features.cache == "on"
        torch.manual_seed(0)
        model = family.skeleton(job.model, vocabulary=VOCABULARY)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        module = family.training_module(job.model, model, cached=cached).train()
        Recompute.of(job.train).apply(family, module)
        self._strategy = build_strategy(job.train, module, family.blocks(module), worker)
        self._batch = packed_batch(job.model, case.rows, VOCABULARY, cached=cached)

    def __call__(self) -> tuple[Measured, Measured]:
        clock = Clock()
        self._strategy.forward_backward([self._batch], len(self._batch.label_ids))
        compute, clock = clock.stop(1), Clock()
        self._strategy.step(1.0)
        return compute, clock.stop(1)


def medians(rounds: Rounds) -> StepSeconds:
    """CPU seconds."""
    return StepSeconds(*(statistics.median(each.cpu_s for each in side) for side in zip(*rounds, strict=True)))


def times_calibration(rounds: Rounds, calibration: Rounds) -> float:
    """How often as long as the calibrating step: the median of the rounds' own ratios, as a slow one weighs on both."""
    totals = [[compute.cpu_s + update.cpu_s for compute, update in side] for side in (rounds, calibration)]
    return statistics.median(mine / other for mine, other in zip(*totals, strict=True))


def planned(case: StepCase, device: Gpu) -> StepSeconds:
    """The planner's parts of the same step, without waiting for data and saving: nothing is read or saved here."""
    config = case.config()
    shape = family_of(config.model).shape(config.model)
    rows = case.rows
    load = Workload(
        sequences_per_step=rows.rows,
        sequence_length=rows.tokens,
        fill=1.0,
        samples_per_sequence=2,
        sample_pairs_per_sequence=rows.tokens**2 / 2,
        images_per_sequence=rows.images / rows.rows,
        label_tokens_per_sequence=rows.label_tokens / rows.rows,
        sequences_per_epoch=None,
        steps=None,
        samples=None,
        epochs=1,
        origin="",
    )
    machine = load_catalog().machines[config.cluster.machine_type]
    time = estimate_time(config, shape, layout_of(config), load, machine, device, cached=config.features.cache == "on")
    parts = {part.name: part.s for part in time.parts}
    return StepSeconds(parts["computing"], parts["optimizer update"])


def device_like(measured: StepSeconds) -> Gpu:
    """A device on which the planner's time of the calibrating case is exactly what was measured."""
    unit = replace(load_catalog().gpus["NVIDIA_TESLA_T4"], fp32_tflops=1.0, memory_gbytes_per_s=1.0)
    of_unit = planned(CASES[CALIBRATION], unit)
    return replace(
        unit, fp32_tflops=of_unit.compute / measured.compute, memory_gbytes_per_s=of_unit.update / measured.update
    )
