"""What the planner says of the memory of a case of `tests.support.trainer.memory_cases`."""

from __future__ import annotations

from dataclasses import replace

from tests.support.trainer.memory_cases import Case
from vlmpipe.planner.memory import host as host_memory
from vlmpipe.planner.memory.activations import activations
from vlmpipe.planner.memory.components import MemoryPart
from vlmpipe.planner.memory.phases import run_phases
from vlmpipe.planner.memory.rank import QUANTIZED, fullest
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.workload import is_cached
from vlmpipe.trainer.models.registry import family_of


def predicted(case: Case, processes: int) -> dict[str, int]:
    """The planner's bytes on one rank: what can be counted, and all that is held at the fullest moment."""
    moments = planned_phases(case, processes, on_gpu=False)
    sizes = {part.name: part.bytes for part in moments["step"]}
    return {
        "weights": sizes["weights"] + sizes.get("frozen weights", 0),
        "bf16_weights": sum(
            part.bytes
            for part in moments["step"]
            if part.name in ("weights", "frozen weights") and part.why.startswith("bf16")
        ),
        "quantized": sizes.get(QUANTIZED, 0),
        "gradients": sizes["gradients"],
        "optimizer": sizes["optimizer"],
        "node_weights": sizes.get(host_memory.NODE_WEIGHTS, 0),
        "peak": sum(part.bytes for part in fullest_parts(moments)),
    }


def fullest_parts(moments: dict[str, list[MemoryPart]]) -> list[MemoryPart]:
    """What the device holds at the moment that decides."""
    return [part for part in fullest(moments)[1] if part.place == "device"]


def planned_phases(case: Case, processes: int, *, on_gpu: bool) -> dict[str, list[MemoryPart]]:
    """All that torch is to allocate on one of `processes` ranks, moment by moment of a step."""
    config = case.config(processes)
    shape = family_of(config.model).shape(config.model)
    shape = replace(shape, shards_frozen=config.train.shard_frozen_weights)
    mixes = [(case.rows.images // case.rows.sequences, case.rows.label_tokens // case.rows.sequences)]
    held = activations(config, shape, mixes=mixes)
    return run_phases(
        config, shape, layout_of(config), held, cached=is_cached(config), passes=case.passes, on_gpu=on_gpu
    )
