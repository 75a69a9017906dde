"""A sweep in the view of a local run: the records of its many steps, and its comparison in lines."""

from __future__ import annotations

import math
import operator
from pathlib import Path

from vlmpipe.records.learning_curve import LearningCurve
from vlmpipe.records.sweep_comparison import SweepComparison
from vlmpipe.runs.folders.curve import curve_lines
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.records.step import read_step, step_file
from vlmpipe.trainer.records.sweep import JOB_STEP, Outcome, Sweep, SweepTraining
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import RUN_FILE, read_record

SHOWN = 40  # variants


def sweep_records(folder: Path, step: str) -> tuple[list[Path], int, int]:
    """The records of all steps of that name, how many trainings have ended, and how many there are."""
    patterns = {
        JOB_STEP: step_file(f"{JOB_STEP}-*"),
        **dict.fromkeys(("prepare-data", "cache-features"), f"variants/*/*/{step_file(step)}"),
    }
    if step not in patterns or not (folder / Sweep.FILE).is_file():
        return [], 0, 0
    runs = sum(1 for _ in folder.glob("variants/*/*/run.json"))
    return sorted(folder.glob(patterns[step])), sum(1 for _ in folder.glob(f"variants/*/*/{Outcome.FILE}")), runs


def work_done(folder: Path) -> float:
    """Return the share of a sweep's training that is done, 0 to 1.

    A training counts by its share of the samples, unless all have `train.max_steps`, and one under way by its steps.
    """
    try:
        sweep = Sweep.read(LocalStorage(folder))
        settings = read_record(LocalStorage(_run_folder(folder, sweep.trainings[0])), RUN_FILE)
        shares = {} if (settings.get("train") or {}).get("max_steps") else sweep.shares
        weights = [shares.get(training.variant, 1.0) for training in sweep.trainings]
        trained = [_trained(folder, training) for training in sweep.trainings]
    except UserError:
        return 0.0
    return math.fsum(map(operator.mul, weights, trained)) / math.fsum(weights)


def _run_folder(sweep: Path, training: SweepTraining) -> Path:
    return sweep / "variants" / training.variant / str(training.start)


def _trained(sweep: Path, training: SweepTraining) -> float:
    folder = _run_folder(sweep, training)
    if (folder / Outcome.FILE).is_file():
        return 1.0
    if not (folder / step_file("train")).is_file():
        return 0.0
    record = read_step(LocalStorage(folder), "train")
    return min(1.0, record.done / record.total) if record and record.total else 0.0


def sweep_lines(comparison: SweepComparison | None, curve: LearningCurve | None) -> list[str]:
    """The learning curve where there is one, else the variants."""
    return curve_lines(curve) if curve else comparison_lines(comparison)


def comparison_lines(comparison: SweepComparison | None) -> list[str]:
    """The variants with their scores, best first, and the answers to hypotheses."""
    if comparison is None:
        return ["no comparison was written"]
    ranked = comparison.ranked
    width = max(len(variant.name) for variant in comparison.variants)
    lines = [f"{comparison.metric} on {comparison.questions:,} validation questions, baseline {comparison.baseline}"]
    for variant, score in ranked[:SHOWN]:
        low, high = score.interval
        tokens = (variant.selection or {}).get("mean_image_tokens")
        parts = [f"  {variant.name:<{width}}  {score.value:.3f} ({low:.3f} to {high:.3f})"]
        parts += [f"{tokens:5.1f} tokens an image"] if tokens is not None else []
        parts += [variant.verdict] if variant.verdict else []
        lines.append("  ".join(parts))
    if more := ranked[SHOWN:]:
        low, high = more[-1][1].value, more[0][1].value
        lines.append(f"  and {len(more):,} more variants, {low:.3f} to {high:.3f}: see the report")
    for variant in comparison.variants:
        if variant.errors:
            failure = variant.errors[0].splitlines()[0]
            lines.append(f"  {variant.name:<{width}}  {len(variant.errors)} failed: {failure}")
    lines += [f"note: {note}" for note in comparison.notes]
    if comparison.hypotheses:
        lines.append("")
    lines += [f"{hypothesis.answer:<13} {hypothesis.claim}" for hypothesis in comparison.hypotheses]
    return lines
