"""Memory of every stage of real pipelines, measured and as the planner says. The first rank of each stage writes what
it holds: three processes for CASES, four for SPLIT_CASES, eight for COPIED_CASES.

torchrun ... -m tests.support.trainer.pipeline_memory --output FILE
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.announced import announced
from tests.support.trainer.measure_memory import measure
from tests.support.trainer.memory_cases import AT_THE_END, IN_FRONT, Case
from vlmpipe.planner.memory.pipeline_stage import stage_phases
from vlmpipe.planner.memory.rank import fullest
from vlmpipe.trainer.config.model import GRID_FAMILIES
from vlmpipe.trainer.distributed.process import run_worker, start_worker
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.pipeline_partition import stages_of

STAGES = 3
DEEP = {"train.pipeline_parallel": STAGES, "model.language_model.config.num_hidden_layers": 6}


def _case(changes: dict[str, Any] | None = None, *, passes: int = 4, cached: bool = True) -> Case:
    return Case("pp", {**DEEP, **(changes or {})}, passes=passes, cached=cached)


CASES = {
    "pp": _case(),
    "pp, many micro-batches": _case(passes=6),
    "pp, fewer micro-batches than stages": _case(passes=2),
    "pp bf16": _case({"train.precision": "bf16"}),
    "pp checkpointing": _case({"train.activation_checkpointing": "full"}),
    "pp bf16 checkpointing": _case({"train.precision": "bf16", "train.activation_checkpointing": "full"}),
    "pp selective": _case({"train.activation_checkpointing": "selective"}),
    "pp online": _case({"features.cache": "off"}, cached=False),
    "pp tower trained": _case({"model.freeze": [], "features.cache": "off"}, cached=False),
    "pp projector only": _case({"model.freeze": ["tower", "language_model"]}),
    "pp frozen in front": _case(IN_FRONT),
    "pp trained at the end": _case(AT_THE_END),
    "pp adapters": _case({"model.lora": {"rank": 8}}),
    "pp interleaved": _case({"train.virtual_stages": 2}, passes=6),
    "pp interleaved bf16 checkpointing": _case(
        {"train.virtual_stages": 2, "train.precision": "bf16", "train.activation_checkpointing": "full"}, passes=3
    ),
}


# Two stages of two ranks that split their layers.
PAIR = {"train.pipeline_parallel": 2, "train.tensor_parallel": 2}
SPLIT = {**PAIR, "model.language_model.config.num_hidden_layers": 6}
SPLIT_CASES = {
    "tp+pp+dp": Case("tp+pp+dp", SPLIT, passes=4),
    "tp+pp+dp adapters": Case("tp+pp+dp", {**SPLIT, "model.lora": {"rank": 8}}, passes=4),
    "tp+pp+dp shared tokens": Case("tp+pp+dp", {**SPLIT, "train.sequence_parallel": True}, passes=4),
    "tp+pp+dp bf16 checkpointing": Case(
        "tp+pp+dp", {**SPLIT, "train.precision": "bf16", "train.activation_checkpointing": "full"}, passes=4
    ),
    "tp+pp+dp selective": Case("tp+pp+dp", {**SPLIT, "train.activation_checkpointing": "selective"}, passes=4),
    "tp+pp+dp tower trained": Case(
        "tp+pp+dp", {**SPLIT, "model.freeze": [], "features.cache": "off"}, passes=4, cached=False
    ),
}


# Of Qwen-VL, of which the first stage has the layers that DeepStack adds to.
LAYERS = "model.pretrained.config.text_config.num_hidden_layers"
BF16: dict[str, Any] = {"train.precision": "bf16"}
ONLINE: dict[str, Any] = {"features.cache": "off"}
TOWER_TRAINED: dict[str, Any] = {"model.freeze": [], **ONLINE}
CHECKPOINTING: dict[str, Any] = {"train.activation_checkpointing": "full"}
INTERLEAVED: dict[str, Any] = {"train.virtual_stages": 2, LAYERS: 8}
SHARED: dict[str, Any] = {"train.sequence_parallel": True}


def _native(strategy: str, changes: dict[str, Any], *, passes: int = 4, cached: bool = True) -> Case:
    ranks = {"train.pipeline_parallel": STAGES} if strategy == "pp" else PAIR
    return Case(strategy, {**ranks, LAYERS: 6, **changes}, passes=passes, cached=cached)


CASES |= {
    f"{family} {name}": replace(case, family=family)
    for family in GRID_FAMILIES
    for name, case in {
        "pp bf16 online": _native("pp", BF16 | ONLINE, cached=False),
        "pp tower trained": _native("pp", TOWER_TRAINED, cached=False),
        "pp bf16 checkpointing": _native("pp", BF16 | CHECKPOINTING),
        "pp interleaved": _native("pp", INTERLEAVED, passes=6),
    }.items()
}
SPLIT_CASES |= {
    f"{family} {name}": replace(case, family=family)
    for family in GRID_FAMILIES
    for name, case in {
        "tp+pp+dp tower trained": _native("tp+pp+dp", TOWER_TRAINED, cached=False),
        "tp+pp+dp shared tokens bf16": _native("tp+pp+dp", SHARED | BF16),
    }.items()
}


# Two copies of the same, over which each stage is sharded.
COPIED_CASES = {
    f"{name}, two copies": replace(SPLIT_CASES[name], copies=2)
    for name in ("tp+pp+dp", "tp+pp+dp adapters", "tp+pp+dp bf16 checkpointing", "tp+pp+dp tower trained")
}
# Four stages: none of the two in the middle has anything outside of its layers.
COPIED_CASES |= {
    f"pp of four stages, two copies{suffix}": replace(
        case, changes={**case.changes, "train.pipeline_parallel": 4}, copies=2
    )
    for suffix, case in {"": _case(), " bf16": _case(BF16), " bf16 checkpointing": _case(BF16 | CHECKPOINTING)}.items()
}


def predicted(case: Case) -> list[dict[str, int]]:
    """The planner's bytes in each stage: what can be counted, and all that is held at the fullest moment."""
    ranks = case.changes["train.pipeline_parallel"] * case.changes.get("train.tensor_parallel", 1)
    config = case.config(case.copies * ranks)
    shape = family_of(config.model).shape(config.model)
    count = config.train.pipeline_parallel
    # Without data there is no mean row to cut by.
    stages = stages_of(shape.language.layers, config.train.stages, None, image_layers=shape.image_layers)
    mixes = [(case.rows.images // case.rows.sequences, case.rows.label_tokens // case.rows.sequences)]
    found = []
    for number in range(count):
        moments = stage_phases(config, shape, stages, number, passes=case.passes, mixes=mixes, on_gpu=False)
        sizes = {part.name: part.bytes for part in moments["step"]}
        weights = sizes.get("weights", 0) + sizes.get("frozen weights", 0)
        found.append(
            {
                "weights": weights,
                "optimizer": sizes.get("optimizer", 0),
                "gradients": sizes.get("gradients", 0),
                "peak": sum(part.bytes for part in fullest(moments)[1]),
            }
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    arguments = parser.parse_args()
    worker = start_worker()
    measured = {}
    for name in announced(arguments.cases, worker, "case"):
        case = {**CASES, **SPLIT_CASES, **COPIED_CASES}[name]
        ranks: list[dict[str, int] | None] = [None] * worker.world_size
        dist.all_gather_object(ranks, measure(case, worker))
        measured[name] = ranks[:: case.copies * case.changes.get("train.tensor_parallel", 1)]
        gc.collect()
    if worker.is_first:
        arguments.output.write_text(json.dumps(measured))
    return 0


if __name__ == "__main__":
    run_worker(main)
