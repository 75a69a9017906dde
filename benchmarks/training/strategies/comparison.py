"""Parts `strategies`, `features` and `precision`: each beside its baseline, in real processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.support.report import Report
from benchmarks.support.suite import Bench
from benchmarks.support.timing import Measured
from benchmarks.training.strategies.cases import EQUAL, GROUPS, ROUNDED, Group, TimedRun

NOTES = {
    "strategies": "Strategies: rounds of a step in real processes under torchrun with gloo's collectives, on the same "
    "global batch and from the same weights. CPU time is summed over ranks; four processes share the cores of this "
    "machine, so that a wall ratio says less than it. What is compared is what a strategy costs in arithmetic and in "
    "copies of memory. Nothing is said about a network or a GPU: what less memory or less traffic gains there is not "
    "in these ratios.",
    "features": "Features of training: as strategies, each beside the same run without it. A ratio below 1 is the "
    "price of the feature on a processor; what it is for (memory, traffic, waiting less for another stage) is not in "
    "it. Compressed gradients are another training: their losses are those without up to the first compressed update, "
    f"and with bf16 within {ROUNDED:g} after it.",
    "precision": "Precision: what the settings cost on this processor, by its instructions for bf16 and 4-bit numbers; "
    "a GPU has others. What they are for is memory and traffic (part state).",
}


def strategies(bench: Bench) -> None:
    """Every strategy beside ddp."""
    beside_their_baselines(bench, "strategies")


def features(bench: Bench) -> None:
    """EMA, checkpointing, compression and others, each beside the same run without it."""
    beside_their_baselines(bench, "features")


def precision(bench: Bench) -> None:
    """State in bf16, 8-bit moments and 4-bit frozen weights, each beside the setting before it."""
    beside_their_baselines(bench, "precision")


def beside_their_baselines(bench: Bench, part: str) -> None:
    """All groups of a part, each under a torchrun of its own."""
    groups = {name: group for name, group in GROUPS.items() if group.part == part}
    bench.expect(len(groups))
    for name, group in groups.items():
        found = bench.call_within(
            name, "benchmarks.training.strategies.steps:time_group",
            {"name": name, "rounds": bench.rounds, "quick": bench.quick},
            ranks=group.processes, most=bench.rounds, kind="rounds",
        )  # fmt: skip
        compare(bench.report, group, name, found)
    bench.report.note(NOTES[part])


def compare(report: Report, group: Group, name: str, found: dict[str, Any]) -> None:
    """Rows of one group; its losses must be those that the law says."""
    baseline = found[group.baseline]
    data = f"{group.processes} processes" if group.part == "strategies" else name
    for other in group.others:
        require_losses(report, f"{other}, {name}", group.runs[other], found[other]["losses"], baseline["losses"])
        ours, theirs = ([Measured(**one) for one in side["rounds"]] for side in (found[other], baseline))
        claim = f"step: {other} or {group.baseline}"
        report.compare_rates(claim, data, "useful tokens", (other, ours), (group.baseline, theirs))


def require_losses(report: Report, what: str, run: TimedRun, losses: list[float], baseline: list[float]) -> None:
    """All losses within EQUAL; of a run that changes its gradients those before that, and the others as near as it
    says."""
    equal = len(baseline) if run.equal is None else run.equal
    assert equal <= len(baseline), "too few steps: what compresses has not begun"
    apart = most_apart(losses[:equal], baseline[:equal]) if equal else 0.0
    law = f"losses with unchanged gradients equal those of the baseline (relative {EQUAL:g})"
    report.require(apart <= EQUAL, law, found=f"{what}: {apart:.1e} apart")
    if run.rounded:
        apart = most_apart(losses, baseline)
        law = f"losses with rounded gradients stay near those of the baseline (relative {run.rounded:g})"
        report.require(apart <= run.rounded, law, found=f"{what}: {apart:.1e} apart")


def most_apart(losses: Sequence[float], baseline: Sequence[float]) -> float:
    """The largest relative difference; not a number where one of the losses is none."""
    return float(np.max(np.abs(np.divide(losses, baseline) - 1)))
