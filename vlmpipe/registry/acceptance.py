"""How often the gate accepts a model that is as good as the champion, better or worse: `vlmpipe gate`.

Exact for independent questions: the sum over all numbers of answers that differ, of which each falls to either side
with a fixed probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from vlmpipe.config.sections.output import GateConfig
from vlmpipe.trainer.evaluation.significance.paired import LEVEL, PairedCounts, is_above

DIFFERENCES = (-0.05, -0.02, -0.01, 0.0, 0.01, 0.02, 0.05)  # of true exact match from the champion's
DIFFERING = (0.05, 0.1, 0.2)  # shares of answers of which just one side's is right
_DEVIATIONS = 7  # of the number of such answers, that are summed over


@dataclass(frozen=True)
class GateRates:
    """Differences that a gate can detect with a given number of questions.

    margin: the drop that must be ruled out; None: a champion is not compared.
    accepted: by share of answers that differ, then by true difference; None for what cannot be.
    """

    questions: int
    margin: float | None
    is_auto: bool
    min_questions: int
    accepted: dict[float, dict[float, float | None]]

    def as_json(self) -> dict[str, object]:
        rates = [
            {"differing": share, "difference": difference, "accepted": rate}
            for share, of_share in self.accepted.items()
            for difference, rate in of_share.items()
        ]
        return {
            "questions": self.questions,
            "margin": self.margin,
            "margin_is_auto": self.is_auto,
            "min_questions": self.min_questions,
            "level": LEVEL,
            "accepted": rates,
        }


def gate_rates(gate: GateConfig, questions: int) -> GateRates:
    """Probabilities that the comparison with the champion alone accepts."""
    margin = gate.margin(questions)
    accepted = (
        {
            share: {
                difference: acceptance(questions, share, difference, margin) if questions >= gate.min_questions else 0.0
                for difference in DIFFERENCES
            }
            for share in DIFFERING
        }
        if margin is not None
        else {}
    )
    return GateRates(questions, margin, gate.max_regression == "auto", gate.min_questions, accepted)


def acceptance(questions: int, differing: float, difference: float, margin: float) -> float | None:
    """How often the test rules out a drop of `margin`; None where `difference` is more than what differs.

    Args:
        differing: share of questions that just one of both answers right.
        difference: the model's true exact match less the champion's.
    """
    if abs(difference) > differing + 1e-12:
        return None
    share = min(1.0, max(0.0, (1 + difference / differing) / 2))
    spread = _DEVIATIONS * math.sqrt(questions * differing * (1 - differing)) + 3
    middle, total = questions * differing, 0.0
    for differ in range(max(0, int(middle - spread)), min(questions, int(middle + spread)) + 1):
        weight = _binomial(differ, questions, differing)
        least = _min_accepted(questions, differ, margin)
        total += weight * _tail(least, differ, share)
    return min(1.0, total)


def _tail(least: int, trials: int, share: float) -> float:
    """How often `trials` draws hit at least `least` times."""
    if share in (0.0, 1.0):
        return float(least <= trials * share)
    reach = _DEVIATIONS * math.sqrt(trials * share * (1 - share)) + 3
    if least <= trials * share - reach:
        return 1.0
    last = min(trials, int(trials * share + reach))
    if least > last:
        return 0.0
    result = total = _binomial(least, trials, share)
    for count in range(least, last):
        result *= (trials - count) / (count + 1) * share / (1 - share)
        total += result
    return min(1.0, total)


@lru_cache(maxsize=65536)
def _min_accepted(questions: int, differ: int, margin: float) -> int:
    """The fewest of the answers that differ which must be the model's; `differ` + 1 where even all do not suffice."""
    low, high = 0, differ + 1
    while low < high:
        middle = (low + high) // 2
        counts = PairedCounts.model_construct(
            questions=questions, only_model=middle, only_other=differ - middle, images=questions, design_effect=1.0
        )
        low, high = (low, middle) if is_above(counts, -margin) else (middle + 1, high)
    return low


def _binomial(count: int, trials: int, share: float) -> float:
    if share in (0.0, 1.0):
        return float(count == trials * share)
    ways = math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
    return math.exp(ways + count * math.log(share) + (trials - count) * math.log1p(-share))
