"""Builds strategies for real, trains two steps under a memory tracker and writes what was held, case by case."""

from __future__ import annotations

import argparse
import gc
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.announced import announced
from tests.support.trainer.memory_cases import CASES, Case
from tests.support.trainer.split_memory_cases import HYBRID_CASES, SPLIT_CASES
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.distributed.data_parallel_rank import replica_of
from vlmpipe.trainer.distributed.process import ProcessContext, run_worker, start_worker
from vlmpipe.trainer.features.quantized_base.nf4 import Nf4Linear, quantize_base
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.strategies.base import Strategy
from vlmpipe.trainer.strategies.registry import build_strategy
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape, inputs_of


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", required=True)
    arguments = parser.parse_args()
    worker = start_worker()
    measured = {}
    for name in announced(arguments.cases, worker, "case"):
        measured[name] = measure({**CASES, **HYBRID_CASES, **SPLIT_CASES}[name], worker)
        gc.collect()
    if worker.is_first:
        arguments.output.write_text(json.dumps(measured))
    return 0


class Scales(TorchDispatchMode):
    """Weighs every storage that is alive after each operation. Unlike a running count it sees storages that are made
    smaller in place, which is how FSDP lets go of gathered weights."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.peak_bytes = 0

    def held_bytes(self) -> int:
        return sum(map(torch.UntypedStorage.nbytes, self._storages))  # after each operation: the shortest way

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:  # shapes without numbers
                # A DTensor itself has no bytes, though it says so; its local part has them.
                self._storages.add(getattr(tensor, "_local_tensor", tensor).untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.held_bytes())
        return result


def measure(case: Case, worker: ProcessContext) -> dict[str, int]:
    """Bytes on this rank: weights, gradients and optimizer state as found, and the most held in a step."""
    job = case.config(worker.world_size)
    family = family_of(job.model)
    torch.manual_seed(0)
    with Scales() as scales:
        model = family.skeleton(job.model, vocabulary=case.vocabulary)
        draw(model)
        if job.model.quantizes_base:
            quantize_base(model)
        module = family.training_module(job.model, model, cached=case.cached).train()
        Recompute.of(job.train).apply(family, module)
        strategy = build_strategy(job.train, module, family.blocks(module), worker)
        batches = [packed_batch(job.model, case.rows, case.vocabulary, cached=case.cached) for _ in range(case.passes)]
        if not replica_of(job.train, worker).takes_images:
            batches = [replace(batch, images=torch.empty(0)) for batch in batches]
        for _ in range(2):  # the second step has the optimizer's state
            gc.collect()
            scales.peak_bytes = 0
            strategy.forward_backward(batches, sum(len(one.label_ids) for one in batches) * worker.world_size)
            gradients, node_weights = gradient_bytes(strategy, module), storage_bytes(of_node(module))
            strategy.step(1.0)
    # Under ZeRO-3 a parameter is empty between steps, and this rank's part of it lies beside it.
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in module.parameters()]
    return {
        "weights": storage_bytes(weights),
        "bf16_weights": storage_bytes(weight for weight in weights if weight.dtype == torch.bfloat16),
        "quantized": storage_bytes(
            buffer for part in module.modules() if isinstance(part, Nf4Linear) for buffer in part.buffers()
        ),
        "gradients": gradients,
        "optimizer": storage_bytes(optimizer_tensors(strategy)),
        "node_weights": node_weights,
        "held": scales.held_bytes(),
        "peak": scales.peak_bytes,
    }


def draw(model: nn.Module) -> None:
    """Numbers for its weights. In a function: a loop's last parameter would be held, also when it has been split."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)


def packed_batch(
    model: ModelConfig, rows: SequenceShape, vocabulary: int, *, cached: bool, sequence_samples: int = 2
) -> PackedBatch:
    """Packed rows."""
    inputs = inputs_of(model, rows, vocabulary, cached=cached, sequence_samples=sequence_samples)
    inputs["label_index"] = torch.arange(rows.label_tokens)
    return PackedBatch(**inputs)


def gradient_bytes(strategy: Strategy, module: nn.Module) -> int:
    """Before the step. DeepSpeed keeps its gradients to itself, and may hold all of one that two ranks share."""
    engine = getattr(strategy, "_engine", None)
    if engine is not None:
        whole = getattr(engine.optimizer, "fp32_groups_gradients_flat", None)  # ZeRO-1 with bf16 weights
        if whole:
            return storage_bytes(whole)
        averaged = getattr(engine.optimizer, "averaged_gradients", {})
        return sum(tensor.nbytes for tensors in averaged.values() if tensors for tensor in tensors)
    return storage_bytes(parameter.grad for parameter in module.parameters() if parameter.grad is not None)


def of_node(module: nn.Module) -> Iterator[Tensor]:
    """Slices of the copy that a node keeps under ZeRO-3."""
    for parameter in module.parameters():
        copied = getattr(parameter, "ds_secondary_tensor", None)
        if copied is not None:
            yield copied


def optimizer_tensors(strategy: Any) -> list[Tensor]:
    optimizer = strategy._optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    held = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    return held + getattr(inner, "moment_tensors", list)()


def storage_bytes(tensors: Any) -> int:
    """Bytes of the storages behind tensors, each once. A DTensor is its local part."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    run_worker(main)
