"""Checks of the gate beside the weights that training started from: what was gained, and what was forgotten.

Each must pass, so neither level needs a correction for the other: a model that fails one of the bounds passes both
tests in 5 % of cases at most (Berger 1982, Multiparameter hypothesis testing and acceptance sampling).
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from vlmpipe.config.sections.output import GateConfig
from vlmpipe.records.decision import Check
from vlmpipe.registry.tested_difference import TestedDifference
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts
from vlmpipe.trainer.records.evaluation import StartScores

GAIN, RETENTION = "gain over the start", "retention"  # names of the checks
NO_START = "the evaluation asked no start weights"


def start_checks(start: StartScores | None, gate: GateConfig) -> Iterator[Check]:
    """The checks that the gate asks for. A comparison that the evaluation lacks is a failed check."""
    obstacle = start.obstacle if start else NO_START
    if gate.min_gain is not None:
        yield _gain(start.paired if start else None, obstacle, gate.min_gain, gate.min_questions)
    if gate.max_forgetting is not None:
        probe = start.retention if start else None
        obstacle = obstacle or (probe.obstacle if probe else "") or "the evaluation asked no retention probe"
        paired = probe.paired if probe else None
        yield _forgetting(paired, obstacle, gate.max_forgetting, gate.min_questions)


def _gain(paired: dict[str, JsonValue] | None, obstacle: str, threshold: float, min_questions: int) -> Check:
    name, metric = GAIN, "exact_match - start"
    if paired is None:
        return Check(name=name, metric=metric, threshold=threshold, passed=False, why=f"no {name}: {obstacle}")
    tested = TestedDifference(name, metric, PairedCounts.model_validate(paired), threshold, min_questions)
    return tested.check(f"{name} {{}} {{}} the required {threshold:.4g}", ("exceeds", "does not surely exceed"))


def _forgetting(paired: dict[str, JsonValue] | None, obstacle: str, most: float, min_questions: int) -> Check:
    name, metric = RETENTION, "retention - start"
    if paired is None:
        why = f"no {name} beside the start: {obstacle}"
        return Check(name=name, metric=metric, threshold=-most, passed=False, why=why)
    tested = TestedDifference(name, metric, PairedCounts.model_validate(paired), -most, min_questions)
    return tested.check(f"{name} {{}} beside the start {{}} a loss of {most:.4g}", ("rules out", "does not rule out"))
