"""A sweep in the view of a local run: the records of its many steps, and its comparison in lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmpipe.trainer.records.step import step_file
from vlmpipe.trainer.trials.files import JOB_STEP, OUTCOME, SWEEP_FILE

SHOWN = 40  # variants


def sweep_records(folder: Path, step: str) -> tuple[list[Path], int, int]:
    """The records of all steps of that name, how many trainings have ended, and how many there are."""
    patterns = {
        JOB_STEP: step_file(f"{JOB_STEP}-*"),
        **dict.fromkeys(("prepare-data", "cache-features"), f"variants/*/*/{step_file(step)}"),
    }
    if step not in patterns or not (folder / SWEEP_FILE).is_file():
        return [], 0, 0
    runs = sum(1 for _ in folder.glob("variants/*/*/run.json"))
    return sorted(folder.glob(patterns[step])), sum(1 for _ in folder.glob(f"variants/*/*/{OUTCOME}")), runs


def comparison_lines(comparison: Mapping[str, Any]) -> list[str]:
    """The variants with their scores, best first, and the answers to hypotheses, from comparison.json."""
    if not comparison:
        return ["no comparison was written"]
    scored = sorted((one for one in comparison["variants"] if one["score"]), key=lambda one: -one["score"]["value"])
    width = max(len(one["name"]) for one in comparison["variants"])
    lines = [
        f"{comparison['metric']} on {comparison['questions']:,} validation questions, baseline {comparison['baseline']}"
    ]
    for one in scored[:SHOWN]:
        low, high = one["score"]["interval"]
        tokens = (one["selection"] or {}).get("mean_image_tokens")
        parts = [f"  {one['name']:<{width}}  {one['score']['value']:.3f} ({low:.3f} to {high:.3f})"]
        parts += [f"{tokens:5.1f} tokens an image"] if tokens is not None else []
        parts += [one["verdict"]] if one["verdict"] else []
        lines.append("  ".join(parts))
    if more := scored[SHOWN:]:
        low, high = more[-1]["score"]["value"], more[0]["score"]["value"]
        lines.append(f"  and {len(more):,} more variants, {low:.3f} to {high:.3f}: see the report")
    failed = [one for one in comparison["variants"] if one["errors"]]
    lines += [
        f"  {one['name']:<{width}}  {len(one['errors'])} failed: {one['errors'][0].splitlines()[0]}" for one in failed
    ]
    lines += [f"note: {note}" for note in comparison.get("notes", ())]  # comparisons of earlier releases have none
    if comparison["hypotheses"]:
        lines.append("")
    lines += [f"{one['answer']:<13} {one['claim']}" for one in comparison["hypotheses"]]
    return lines
