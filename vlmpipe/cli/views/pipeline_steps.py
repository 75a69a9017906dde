"""Table of a pipeline's own steps and of its jobs' starts."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from vlmpipe.cli.views.amounts import amount, hours_text
from vlmpipe.cli.views.tables import ruled_table
from vlmpipe.records.plan_json import PipelineJson, PipelineStepJson

GB = 1e9
LEGEND = "Of disk and memory: needed/there. A job has its start alone."


def pipeline_steps(pipeline: PipelineJson) -> Iterator[RenderableType]:
    """The decision in one line, then a line for each step, from `PipelinePlan.as_dict()`."""
    steps = pipeline["steps"]
    open_disks = [step["name"] for step in steps if step["disk_needed_bytes"] is None]
    verdict = "a disk or memory is too small" if pipeline["errors"] else "disks and memory suffice"
    if open_disks and not pipeline["errors"]:
        verdict += f", as far as known: not of {', '.join(dict.fromkeys(open_disks))}"
    text = f"Pipeline steps: {pipeline['machines']} machines, {hours_text(pipeline['hours'])}, "
    text += f"{amount(pipeline['usd'])} in addition to jobs; {verdict}"
    yield Text(text, style="bold red" if pipeline["errors"] else "bold")
    right = ("disk\nGB", "memory\nGB", "start+work\nmin", "cost")
    table = ruled_table("step", "machines", *right, right=right)
    table.padding = (0, 1, 0, 0)  # 80 columns hold the longest names
    for step in steps:
        fails = any(step["name"] in error.partition(":")[0].split() for error in pipeline["errors"])
        of_default = f"{step['tasks']} x {step['machine']}" if step["tasks"] > 1 else step["machine"]
        table.add_row(
            "  its job" if step["is_job"] else step["name"],
            of_default,
            _of(step["disk_needed_bytes"], step["disk_free_bytes"]),
            "" if step["is_job"] else _of(step["memory_needed_bytes"], step["memory_bytes"]),
            _minutes(step),
            amount(step["usd"]),
            style="red" if fails else "dim" if step["is_job"] else "",
        )
    yield table


def _of(needed: float | None, there: float | None) -> str:
    shown = "?" if needed is None else f"{needed / GB:,.0f}"
    return shown if there is None else f"{shown}/{there / GB:,.0f}"


def _minutes(step: PipelineStepJson) -> str:
    start = f"{step['start_s'] / 60:.1f}"
    if step["is_job"]:
        return start
    if step["watches_s"] is None or step["work_s"] is None:
        return f"{start}+?" if step["watches_s"] is not None else f"{start}+job"
    return f"{start}+job" if step["watches_s"] else f"{start}+{step['work_s'] / 60:.1f}"
