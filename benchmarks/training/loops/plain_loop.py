"""A plain training loop beside ours: what is written by hand in an afternoon, on the same module and batches.

It reads and collates a step's packed sequences when it needs them, with our loader and in its own thread; ours makes
them two steps ahead in another. It has no metrics, checkpoints, watchdog or validation, and knows one process.
"""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks.support.timing import Clock
from benchmarks.support.workloads import Workload
from benchmarks.training.loops.our_loop import Length, Trained
from vlmpipe.trainer.dataloading.batches import cached_images, collate
from vlmpipe.trainer.feature_cache.reader import FeatureReader
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.optimizer.build import build_optimizer

CPU = torch.device("cpu")


def plain_loop(load: Workload, length: Length) -> Trained:
    """Training with cached features. Units: useful tokens."""
    job, family = load.cached, family_of(load.cached.model)
    module = family.training_module(job.model, family.build(job.model, load.chat.tokenizer), cached=True).train()
    Recompute.of(job.train).apply(family, module)
    optimizer = build_optimizer(module, job.train.optimizer)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    images = cached_images(FeatureReader.open(job.pointers().features_uri), job.model)
    loader, size = load.loader(images=False), job.train.micro_batch_size
    losses: list[float] = []
    tokens, clock = 0, Clock()
    for step in range(length.end):
        if step == length.warm_up:
            tokens, clock = 0, Clock()
        sequences = loader.sequences_for_step(step, 0, 1)
        label_tokens, step_loss = loader.sampler.label_tokens(loader.sampler.batch(step)), 0.0
        for start in range(0, len(sequences), size):
            batch = collate(sequences[start : start + size], images)
            loss = module(**batch.to(CPU)) / label_tokens
            loss.backward()
            step_loss += loss.item()
        clip_grad_norm_(parameters, job.train.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step_loss)
        tokens += sum(each.tokens for each in sequences)
    return Trained(clock.stop(tokens), losses)
