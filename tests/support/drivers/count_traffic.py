"""Count the numbers that each strategy's collectives carry in one step; print them as JSON.

torchrun ... -m tests.support.drivers.count_traffic --strategies ddp fsdp
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.support.trainer.flop_cases import QWEN2_5_VL, QWEN3_VL, model_config
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.dataloading.batches import PackedBatch
from vlmpipe.trainer.distributed.process import ProcessContext, run_worker, start_worker
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.strategies.registry import build_strategy
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape, inputs_of

MICRO_STEPS, MICRO_ROWS, ROW_TOKENS, LABELS, VOCABULARY = 2, 2, 64, 20, 300  # and one image
MARK = "traffic: "
SELECTIVE = {"activation_checkpointing": "selective"}
# Beside each strategy by itself: changes of the model section, and of the train section.
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "zero3 node weights": ("zero3", {}, {"deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 2}}}),
    "zero3 after them": ("zero3", {}, {}),  # in the same process, of which DeepSpeed keeps the groups
    "fsdp gathered once": ("fsdp", {}, {"reshard_after_forward": "never"}),
    "fsdp gathered twice": ("fsdp", {}, {"reshard_after_forward": "always"}),
    "fsdp two layers ahead": ("fsdp", {}, {"prefetch_layers": 2}),
    "tp adapters": ("tp", {"lora": {"rank": 4}}, {}),
    "tp shared tokens": ("tp", {}, {"sequence_parallel": True}),
    "tp shared tokens checkpointing": ("tp", {}, {"sequence_parallel": True, "activation_checkpointing": "full"}),
    "tp selective": ("tp", {}, SELECTIVE),
    "tp adapters selective": ("tp", {"lora": {"rank": 4}}, SELECTIVE),
    "tp shared tokens selective": ("tp", {}, SELECTIVE | {"sequence_parallel": True}),
    "tp checkpointing": ("tp", {}, {"activation_checkpointing": "full"}),
    "ddp context parallel": ("ddp", {}, {"context_parallel": 2}),
    "fsdp qwen3-vl context parallel": ("fsdp", QWEN3_VL, {"context_parallel": 2, "activation_checkpointing": "full"}),
    "zero2 context parallel": ("zero2", {}, {"context_parallel": 2, "activation_checkpointing": "selective"}),
    "tp qwen2.5-vl": ("tp", QWEN2_5_VL | {"freeze": ()}, {}),
    "tp qwen3-vl shared tokens": ("tp", QWEN3_VL, {"sequence_parallel": True}),
}


def count(name: str, worker: ProcessContext) -> dict[str, int]:
    """Numbers that went into each kind of collective on this rank, in the last of some steps, in fp32."""
    strategy_name, of_model, of_train = OTHERS.get(name, (name, {}, {}))
    config = model_config(**of_model)
    family = family_of(config)
    torch.manual_seed(0)
    model = family.skeleton(config, vocabulary=VOCABULARY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    module = family.training_module(config, model, cached=False).train()
    changes = {name.removeprefix("train."): value for name, value in strategy_changes(strategy_name).items()}
    changes |= of_train
    degrees = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    copies = worker.world_size // math.prod(changes.get(name, 1) for name in degrees)
    settings = TrainConfig.model_validate(
        {
            **changes,
            "global_batch_size": MICRO_STEPS * MICRO_ROWS * copies,
            "micro_batch_size": MICRO_ROWS,
            "precision": "fp32",
            "optimizer": {"learning_rate": 1e-3},
            "clip_grad_norm": 0.0,
        }
    )
    Recompute(layers=settings.activation_checkpointing).apply(family, module)
    strategy = build_strategy(settings, module, family.blocks(module), worker)
    batch = PackedBatch(**inputs_of(config, SequenceShape(MICRO_ROWS, ROW_TOKENS, 1, LABELS), VOCABULARY, cached=False))
    # In the first step ranks compare their models.
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            strategy.forward_backward([batch] * MICRO_STEPS, total_label_tokens=100)
            strategy.step(1.0)
    found: Counter[str] = Counter()
    for event in profiled.events():
        if event.name.startswith("gloo:"):
            found[event.name.removeprefix("gloo:")] += sum(
                math.prod(sizes) for sizes in event.input_shapes if sizes and isinstance(sizes[0], int)
            )
    return _most(found)


def _most(mine: Counter[str]) -> dict[str, int]:
    """Of each kind, what the rank has that sent most: stages of a pipeline differ."""
    ranks: list[Counter[str]] = [Counter()] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return {kind: max(one[kind] for one in ranks) for kind in sorted(set().union(*ranks))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategies", nargs="+", required=True)
    strategies = parser.parse_args().strategies
    worker = start_worker()
    counted = {name: count(name, worker) for name in strategies}
    if worker.is_first:
        print(MARK + json.dumps(counted))


if __name__ == "__main__":
    run_worker(main)
