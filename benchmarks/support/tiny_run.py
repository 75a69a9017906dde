"""A real strategy over a tiny model that needs no data: the same weights and batches on every device and rank."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.support.trainer.measure_memory import packed_batch
from tests.support.trainer.memory_cases import Case
from vlmpipe.config.run_config import RunConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.features.float8.products import compute_in_float8
from vlmpipe.trainer.features.quantized_base.nf4 import quantize_base
from vlmpipe.trainer.models.layers.bf16 import use_tf32
from vlmpipe.trainer.models.layers.compile import compile_layers
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.strategies.base import Strategy
from vlmpipe.trainer.strategies.registry import build_strategy


class TinyRun:
    """A case on one process; each step trains on the same micro-batches."""

    def __init__(self, case: Case, worker: ProcessContext, *, samples: int = 2, drawn_on_host: bool = True) -> None:
        """`samples`: of each packed sequence. Weights drawn on the device are others there, and drawn sooner."""
        self.worker, job = worker, case.config(worker.world_size)
        self.strategy = strategy_of(job, case, worker, drawn_on_host=drawn_on_host)
        batches = drawn_batches(job.model, case, case.passes, samples=samples)
        self.batches = [batch.pinned() if worker.device.type == "cuda" else batch for batch in batches]
        self.label_tokens = sum(len(batch.label_ids) for batch in batches)

    def step(self) -> Tensor:
        """One training step. Returns its loss."""
        loss = self.strategy.forward_backward(self.batches, self.label_tokens)
        self.strategy.step(1.0)
        return loss


def strategy_of(job: RunConfig, case: Case, worker: ProcessContext, *, drawn_on_host: bool = True) -> Strategy:
    """Built anew: matrices are drawn, norms are 1 and biases 0."""
    family = family_of(job.model)
    with worker.device:
        model = family.skeleton(job.model, vocabulary=case.vocabulary)
    device = torch.device("cpu") if drawn_on_host else worker.device
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device=device) * 0.02)
            else:
                parameter.fill_(float(name.endswith("weight")))
    if job.model.quantizes_base:
        quantize_base(model)
    module = family.training_module(job.model, model, cached=case.cached).train()
    Recompute.of(job.train).apply(family, module)
    use_tf32(job.train.precision, worker.device)
    blocks = family.blocks(module)
    if job.train.float8 != "none":
        compute_in_float8(blocks, job.train.float8, worker.device)
    if job.train.compile == "on":
        compile_layers(blocks, job.train.compile_backend)
    return build_strategy(job.train, module, blocks, worker)


def drawn_batches(model: ModelConfig, case: Case, count: int, *, seed: int = 1, samples: int = 2) -> list[PackedBatch]:
    """Micro-batches of which no two are equal, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    same = packed_batch(model, case.rows, case.vocabulary, cached=case.cached, sequence_samples=samples)
    return [_drawn(same, case.vocabulary, generator) for _ in range(count)]


def _drawn(batch: PackedBatch, vocabulary: int, generator: torch.Generator) -> PackedBatch:
    """With tokens of text, labels and images that differ."""
    drawn = torch.randint(vocabulary - 1, batch.input_ids.shape, generator=generator)
    is_image = batch.input_ids == vocabulary - 1
    assert isinstance(batch.images, torch.Tensor)
    return replace(
        batch,
        input_ids=torch.where(is_image, batch.input_ids, drawn),
        label_ids=torch.randint(vocabulary - 1, batch.label_ids.shape, generator=generator),
        images=torch.randn(batch.images.shape, generator=generator).to(batch.images.dtype),
    )
