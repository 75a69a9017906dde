"""Benchmarks that the run's evaluation does not run, or whose scores the gate cannot find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vlmpipe.config.validation_errors import Problem
from vlmpipe.trainer.config.benchmarks import MAX_CIDER_D, NO_GOAL, SCORES
from vlmpipe.trainer.config.external_trainer import HF_RESULTS
from vlmpipe.trainer.hooks.rules import obstacles_to

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields


def benchmark_problems(config: RunFields) -> Iterator[Problem]:
    formats = {benchmark.name: benchmark.format for benchmark in config.evaluate.benchmarks}
    if formats and config.train.trainer and config.train.trainer.evaluate_command:
        text = "found with train.trainer.evaluate_command, which evaluates in place of ours; expected one of the two"
        yield Problem("evaluate.benchmarks", text)
    tasks = config.evaluate.lmms_eval.tasks if config.evaluate.lmms_eval else ()
    if tasks:
        yield from _lmms_eval_problems(config, tasks)
    for name, floors in config.gate.benchmarks.items():
        if name in tasks:  # whose scores only lmms-eval knows; the gate rejects a model that lacks one
            continue
        if name not in formats:
            names = ", ".join([*formats, *tasks])
            known = f"one of {names}" if names else "benchmarks in evaluate.benchmarks, which has none"
            yield Problem(f"gate.benchmarks.{name}", f"found a benchmark that is not run, expected {known}")
            continue
        scores = [score for score in SCORES[formats[name]] if score not in NO_GOAL]
        for score, floor in floors.items():
            path, most = f"gate.benchmarks.{name}.{score}", MAX_CIDER_D if score == "cider_d" else 1.0
            if score not in scores:
                yield Problem(path, f"found a score that {formats[name]} has not, expected {', '.join(scores)}")
            elif floor > most:
                yield Problem(path, f"found {floor:g}, more than its largest value; expected at most {most:g}")


def _lmms_eval_problems(config: RunFields, tasks: Sequence[str]) -> Iterator[Problem]:
    path, trainer = "evaluate.lmms_eval", config.train.trainer
    if twice := [benchmark.name for benchmark in config.evaluate.benchmarks if benchmark.name in tasks]:
        yield Problem(
            f"{path}.tasks", f"found {twice[0]}, which evaluate.benchmarks has too; expected other names there"
        )
    if config.model.exports_adapter:
        text = "found with model.lora.export adapter, which transformers serve does not serve; expected merged"
        yield Problem(path, text)
    yield from (Problem(path, reason) for reason in obstacles_to("lmms_eval", config))
    if trainer and trainer.result not in HF_RESULTS:
        text = f"found with train.trainer.result {trainer.result}, expected one that transformers serve can load: "
        yield Problem(path, text + ", ".join(HF_RESULTS))
