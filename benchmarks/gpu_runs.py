"""A strategy of one process on the device, with nothing of another beside it: what `benchmarks.on_gpu` measures."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from tests.support.trainer.measure_memory import packed_batch
from tests.support.trainer.memory_cases import Case
from trainer.dataloading.batches import PackedBatch
from trainer.distributed.process import ProcessContext
from trainer.models.layers.recompute_policy import Recompute
from trainer.models.registry import family_of
from trainer.strategies.base import Strategy
from trainer.strategies.registry import build_strategy
from trainer.tracing.fake_inputs import SequenceShape

LANGUAGE, TOWER = "model.language_model.config", "model.tower.config"
Found = TypeVar("Found")


@dataclass(frozen=True)
class Size:
    """Of a LLaVA model, and of its rows."""

    changes: dict[str, Any]
    rows: SequenceShape
    vocabulary: int
    samples: int  # in a row


def _size(hidden: int, layers: int, inner: int, heads: int, *, tokens: int, images: int, samples: int) -> Size:
    tower = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    language = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner}
    heads_too = {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": tokens}
    changes = {
        **{f"{LANGUAGE}.{name}": value for name, value in (language | heads_too).items()},
        **{f"{TOWER}.{name}": value for name, value in (tower | {"patch_size": 16, "image_size": 384}).items()},
        "model.image_size": 384,
        "train.loss_chunk_tokens": 1024,
        "train.deterministic": False,
    }
    return Size(changes, SequenceShape(1, tokens, images, tokens // 4), 32000, samples)


TINY = Size({}, SequenceShape(2, 128, 4, 96), 300, 2)
MIDDLE = _size(1024, 12, 2816, 16, tokens=2048, images=2, samples=2)  # some 0.2 billion parameters
LARGE = _size(2048, 24, 5504, 16, tokens=8192, images=8, samples=8)  # 1.3 billion, as the goal says: packed at 8k


class Run:
    """A strategy of one process with a step's batches, which are the same each time."""

    def __init__(self, case: Case, size: Size, worker: ProcessContext) -> None:
        self.job, self.worker = case.config(1), worker
        family = family_of(self.job.model)
        with worker.device:
            model = family.skeleton(self.job.model, vocabulary=case.vocabulary)
        generator = torch.Generator().manual_seed(0)  # the host's, so that every device gets the same numbers
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.02 if parameter.ndim > 1 else None
            with torch.no_grad():
                parameter.copy_(torch.full_like(parameter, name.endswith("weight")) if drawn is None else drawn)
        module = family.training_module(self.job.model, model, cached=case.cached).train()
        Recompute.of(self.job.train).apply(family, module)
        self.strategy: Strategy = build_strategy(self.job.train, module, family.blocks(module), worker)
        batch = filled(
            packed_batch(self.job.model, case.rows, case.vocabulary, cached=case.cached, sequence_samples=size.samples),
            case,
        )
        self.batches = [batch.pinned() if worker.device.type == "cuda" else batch] * case.passes
        self._label_tokens = case.passes * len(batch.label_ids)

    def step(self) -> torch.Tensor:
        loss = self.strategy.forward_backward(self.batches, self._label_tokens)
        self.strategy.step(1.0)
        return loss


def filled(batch: PackedBatch, case: Case) -> PackedBatch:
    """With tokens of text and labels that differ."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(case.vocabulary - 1, batch.input_ids.shape, generator=generator)
    is_image = batch.input_ids == case.vocabulary - 1
    return replace(
        batch,
        input_ids=torch.where(is_image, batch.input_ids, drawn),
        label_ids=torch.randint(case.vocabulary - 1, batch.label_ids.shape, generator=generator),
        images=torch.randn(batch.images.shape, generator=generator).to(batch.images.dtype),
    )


def case_of(size: Size, strategy: str, changes: dict[str, Any], *, cached: bool = True, passes: int = 2) -> Case:
    return Case(strategy, size.changes | changes, passes, cached, size.rows, size.vocabulary)


def alone(measure: Callable[[Run], Found], case: Case, size: Size, worker: ProcessContext) -> Found:
    """What `measure` finds of a run, before and after which the device holds nothing of another."""
    empty(worker)
    try:
        return _measured(measure, case, size, worker)
    finally:
        empty(worker)


def _measured(measure: Callable[[Run], Found], case: Case, size: Size, worker: ProcessContext) -> Found:
    """In a function of its own, so that the run is nobody's when it returns."""
    run = Run(case, size, worker)
    try:
        return measure(run)
    finally:
        let_go(run.strategy)


def let_go(strategy: Strategy) -> None:
    """Makes an engine of DeepSpeed one that dies: hooks hold it in autograd's objects, which Python's collection does
    not see, and under ZeRO-3 tables of the process hold the modules of all engines."""
    engine: Any = getattr(strategy, "_engine", None)
    if engine is None:
        return
    engine.destroy()
    if engine.zero_optimization_stage() == 3:
        from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

        parameter_offload.FWD_MODULE_STACK.clear()
        coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
        unwrapped = inspect.getclosurevars(coordinator._PartitionedParameterCoordinator__params_to_release)
        unwrapped.nonlocals["func"].cache_clear()


def empty(worker: ProcessContext) -> None:
    gc.collect()
    if worker.device.type == "cuda":
        torch.cuda.empty_cache()


def wait(worker: ProcessContext) -> None:
    if worker.device.type == "cuda":
        torch.cuda.synchronize()
