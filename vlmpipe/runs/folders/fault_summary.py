"""Summary of faults in a run, injected (`vlmpipe run --inject-fault`) or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vlmpipe.runs.folders.stages import stage_folders
from vlmpipe.runs.run_state import RunState
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import read_lines

FAULTS_FILE = "faults.jsonl"  # in the folder of a stage
NAMES = {"preempt": "preemption", "kill": "kill", "stop": "stop of a node"}


def read_faults(folder: Path, *, since_s: float) -> list[dict[str, object]]:
    """The lines of faults.jsonl of all stages from this attempt on; none for a run without faults."""
    stores = [LocalStorage(stage) for stage in stage_folders(folder).values()]
    lines = [line for store in stores if store.stat(FAULTS_FILE) for line in read_lines(store, FAULTS_FILE)]
    return [line for line in lines if line["time_s"] >= since_s]


def fault_lines(lines: Iterable[dict[str, Any]], *, survived: bool) -> list[str]:
    """A sentence on the faults, and one for each event that did not happen.

    The number of repeated steps is a lower bound: steps after training's last record are not known.
    """
    result = Counter(line["event"] for line in lines)
    events = ", ".join(_count(result[kind], name) for kind, name in NAMES.items() if result[kind])
    repeated = sum(line.get("steps_repeated", 0) for line in lines)
    summary = []
    if events:
        cost = f"{_count(result['restart'], 'restart')}, at least {_count(repeated, 'step')} made twice"
        summary.append(f"{'survived' if survived else 'met'} {events}: {cost} ({FAULTS_FILE})")
    return summary + [f"did not happen: {line['faults']}" for line in lines if line["event"] == "missed"]


def restart_lines(state: RunState) -> list[str]:
    """A note for each restart of a job's replicas."""
    return [f"{step.title}: {text}" for step in state.steps for text in step.detail.get("restarts") or []]


def _count(number: int, name: str) -> str:
    noun, _, rest = name.partition(" ")
    return f"{number} {noun}{'' if number == 1 else 's'}{' ' if rest else ''}{rest}"
