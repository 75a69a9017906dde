"""The training module under its strategy."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from vlmpipe.trainer.config.compiling import CompileChoice, compile_choice
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.evaluation.answer_misses import AnswerMisses
from vlmpipe.trainer.evaluation.validation_loss import EXACT_MATCH
from vlmpipe.trainer.hooks.features import features_of
from vlmpipe.trainer.models.layers.bf16 import use_tf32
from vlmpipe.trainer.models.layers.compile import compile_layers, has_compiler
from vlmpipe.trainer.models.layers.deferred_weights import DeferredWeights
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.monitoring.rank_metrics import ForwardTimer, waitless
from vlmpipe.trainer.monitoring.source_losses import SourceLosses
from vlmpipe.trainer.preflight.delta_rules import require_right_rules
from vlmpipe.trainer.setup.model import BuiltModel
from vlmpipe.trainer.setup.open_run import OpenRun
from vlmpipe.trainer.sizing.model_shape import ModelShape
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.strategies.base import Strategy
from vlmpipe.trainer.strategies.registry import build_strategy as strategy_of


@dataclass(frozen=True)
class LossNotes:
    """Counters that are given the loss of each label; None for those that a run has no use for."""

    sources: SourceLosses | None = None
    misses: AnswerMisses | None = None

    @classmethod
    def of(cls, run: OpenRun) -> LossNotes:
        """The counters of a run, on the rank's device."""
        counts_misses = run.job.train.best_metric == EXACT_MATCH
        misses = AnswerMisses(run.worker.device) if counts_misses else None
        return cls(SourceLosses.of(run.job, run.worker.device), misses)


@dataclass(frozen=True)
class ReadyStrategy:
    """A strategy with the module that it trains."""

    strategy: Strategy
    shape: ModelShape
    compiling: CompileChoice
    forward_timer: ForwardTimer | None  # of what no rank waits for another in; None with nothing to time


def build_strategy(run: OpenRun, built: BuiltModel, notes: LossNotes) -> ReadyStrategy:
    """The training module, with what features change in it, compiled and sharded."""
    job, family, worker = run.job, run.family, run.worker
    shape = family.shape(job.model)
    compiling = _compile_choice(job, shape, worker)
    module = family.training_module(job.model, built.model, cached=run.data.cached).train()
    line = require_right_rules(module, worker.device)
    if line and worker.is_first:
        print(f"train: {line}", flush=True)
    Recompute.of(job.train).apply(family, module)
    use_tf32(job.train.precision, worker.device)
    units = dataclasses.replace(family.blocks(module), sequence_flops=built.sequence_flops)
    units.loss.note_terms = notes.sources.add if notes.sources else None
    units.loss.note_misses = notes.misses.add if notes.misses else None
    if built.deferred:
        fill = DeferredWeights(built.model, built.deferred, worker.device).fill
        units = dataclasses.replace(units, fill=fill)
    for feature in features_of(job):
        units.loss.pair_loss = feature.pair_loss(job.train) or units.loss.pair_loss
        units.loss.added_loss = feature.added_loss(job.train, units) or units.loss.added_loss
        line = feature.change_layers(job.train, units, worker.device)
        if line and worker.is_first:
            print(f"train: {line}", flush=True)
    if compiling.on:
        compile_layers(units, job.train.compile_backend, must=job.train.compile == "on")
    if worker.is_first:
        print(f"train: compile {compiling.state}: {compiling.why}", flush=True)
    strategy = strategy_of(job.train, module, units, worker)
    timed = waitless(job.train, module, units, compiled=compiling.on)
    timer = ForwardTimer(timed, worker.device) if timed else None
    if worker.is_first and job.train.strategy.startswith("zero"):
        content = json.dumps(getattr(strategy, "settings", {}), indent=1, sort_keys=True)
        open_storage(job.run.run_uri).write("deepspeed.json", content.encode())
    return ReadyStrategy(strategy, shape, compiling, timer)


def _compile_choice(job: JobConfig, shape: ModelShape, worker: ProcessContext) -> CompileChoice:
    return compile_choice(
        job.train,
        on_gpu=worker.device.type == "cuda",
        parameters=shape.total_parameters,
        sequence_length=job.data.sequence_length,
        quantizes_base=job.model.quantizes_base,
        has_compiler=has_compiler(),
    )
