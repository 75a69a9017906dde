"""Part `baseline`: how often the gate's bounds on gain and forgetting accept, alone and both, by simulated evaluations
through `decide`; and how often one of several slices without a difference is called one, corrected by Holm.

Fails where a model at a bound is accepted, or any of equal slices is told apart, more often than 5 % and chance.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.config.sections.output import GateConfig
from vlmpipe.registry.gate import decide
from vlmpipe.trainer.evaluation.baseline.compared import BeforeAfter
from vlmpipe.trainer.evaluation.significance.paired import paired_counts
from vlmpipe.trainer.records.evaluation import Evaluation, Retention, StartScores

SIZES = ((60, 1), (200, 1), (40, 5), (200, 5))  # images, questions of each
BOUND = 0.05  # of the gain and of the forgetting
DIFFERING = 0.2  # share of answers that only one of both weights gives right
TOGETHER = 0.3  # share of images whose questions all have one outcome
LEVEL, DEVIATIONS = 0.055, 3  # of models at a bound; of a simulated share, beyond which it is no chance
SLICES = 8
GATES = {
    "gain": GateConfig(min_margin_over_chance=None, min_questions=1, min_gain=BOUND),
    "forgetting": GateConfig(min_margin_over_chance=None, min_questions=1, max_forgetting=BOUND),
    "both": GateConfig(min_margin_over_chance=None, min_questions=1, min_gain=BOUND, max_forgetting=BOUND),
}
# True gain and true loss on the probe.
CASES = {
    "at both bounds": (BOUND, BOUND),
    "at the gain's, nothing forgotten": (BOUND, 0.0),
    "15 points gained, at the loss's": (0.15, BOUND),
    "15 points gained, nothing forgotten": (0.15, 0.0),
}


def baseline(bench: Bench) -> None:
    trials = 200 if bench.quick else 1000
    chance = np.random.default_rng(0)
    for images, each in SIZES:
        data = f"{images:,} images x {each}"
        for case, (gain, loss) in CASES.items():
            bench.at(f"{data}, {case}", 0.0)
            accepted = dict.fromkeys(GATES, 0)
            for _ in range(trials):
                start = StartScores(
                    paired=drawn(chance, images, each, gain),
                    retention=Retention(paired=drawn(chance, images, each, -loss)),
                )
                evaluation = Evaluation(questions=images * each, start=start)
                for name, gate in GATES.items():
                    accepted[name] += decide(evaluation, gate).accepted
            for name, count in accepted.items():
                bench.report.figure(f"{case}; bound on {name}", data, "share accepted", Side("gate", [count / trials]))
            at_bound = {"gain": gain == BOUND, "forgetting": loss == BOUND, "both": BOUND in (gain, loss)}
            for name in (name for name, is_at in at_bound.items() if is_at):
                require(bench, f"{data}, {case}: bound on {name}", accepted[name], trials)
        equal_slices(bench, chance, images, each, trials // 4)


def drawn(chance: np.random.Generator, images: int, each: int, difference: float) -> dict[str, object]:
    shares = [(DIFFERING - difference) / 2, 1 - DIFFERING, (DIFFERING + difference) / 2]
    values = chance.choice([-1, 0, 1], size=(images, each), p=shares)
    as_one = chance.random(images) < TOGETHER
    values[as_one] = values[as_one][:, :1]
    groups = np.repeat(np.arange(images), each).tolist()
    return paired_counts(groups, (values == 1).ravel().tolist(), (values == -1).ravel().tolist()).model_dump()


def equal_slices(bench: Bench, chance: np.random.Generator, images: int, each: int, trials: int) -> None:
    """Slices that training has not changed: how often any is called better or worse."""
    data, told = f"{images:,} images x {each}", 0
    bench.at(f"{data}, {SLICES} equal slices", 0.0)
    groups = [str(group) for group in np.repeat(np.arange(images), each)]
    for _ in range(trials):
        values = chance.choice([-1, 0, 1], size=(images, each), p=[DIFFERING / 2, 1 - DIFFERING, DIFFERING / 2])
        members: dict[tuple[str, str], list[int]] = {("", str(number)): [] for number in range(SLICES)}
        for number in range(images * each):
            members["", str(number // each % SLICES)].append(number)
        pairs = BeforeAfter(groups, (values == -1).ravel().tolist(), (values == 1).ravel().tolist())
        told += any(one.verdict in ("better", "worse") for one in pairs.slices(members))
    require(bench, f"{data}: equal slices", told, trials)
    bench.report.figure(f"any of {SLICES} equal slices", data, "share told apart", Side("Holm", [told / trials]))


def require(bench: Bench, what: str, count: int, trials: int) -> None:
    share, spread = count / trials, DEVIATIONS * math.sqrt(LEVEL * (1 - LEVEL) / trials)
    bench.report.require(share <= LEVEL + spread, f"{what}: the level holds", found=f"{share:.3f}")
