"""Benchmarks that the run's evaluation does not run, or whose scores the gate cannot find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.config.benchmarks import MOST_CIDER_D, NO_GOAL, SCORES
from vlmpipe.config.validation_errors import Problem

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig


def benchmark_problems(config: RunConfig) -> Iterator[Problem]:
    formats = {benchmark.name: benchmark.format for benchmark in config.evaluate.benchmarks}
    if formats and config.train.trainer and config.train.trainer.evaluate_command:
        text = "found with train.trainer.evaluate_command, which evaluates in place of ours; expected one of the two"
        yield Problem("evaluate.benchmarks", text)
    for name, floors in config.gate.benchmarks.items():
        if name not in formats:
            known = f"one of {', '.join(formats)}" if formats else "benchmarks in evaluate.benchmarks, which has none"
            yield Problem(f"gate.benchmarks.{name}", f"found a benchmark that is not run, expected {known}")
            continue
        scores = [score for score in SCORES[formats[name]] if score not in NO_GOAL]
        for score, floor in floors.items():
            path, most = f"gate.benchmarks.{name}.{score}", MOST_CIDER_D if score == "cider_d" else 1.0
            if score not in scores:
                yield Problem(path, f"found a score that {formats[name]} has not, expected {', '.join(scores)}")
            elif floor > most:
                yield Problem(path, f"found {floor:g}, more than its largest value; expected at most {most:g}")
