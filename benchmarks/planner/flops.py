"""Part `flops`: the planner's FLOPs of a forward and backward pass, beside torch's FlopCounterMode."""

from __future__ import annotations

from benchmarks.support.suite import Bench
from tests.support.trainer import flop_cases
from vlmpipe.trainer.config.train_options import Checkpointing

QUICK_CASES = 2
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "full")


def flops(bench: Bench) -> None:
    """Models of every kind, with and without features and checkpointing."""
    cases = [(name, False) for name in flop_cases.CASES] + flop_cases.CACHEABLE
    by_label = {name + (", cached" if cached else ""): (name, cached) for name, cached in cases}
    labels = list(by_label)[: QUICK_CASES if bench.quick else None]
    for label in bench.cases("models", labels):
        name, cached = by_label[label]
        config = flop_cases.model_config(**flop_cases.CASES[name])
        for checkpointing in CHECKPOINTING:
            found, truth = (
                take(config, cached=cached, checkpointing=checkpointing)
                for take in (flop_cases.by_formula, flop_cases.counted)
            )
            case = label + (", checkpointing" if checkpointing == "full" else "")
            bench.report.predict("FLOPs", case, "MFLOP", found / 1e6, truth / 1e6)
