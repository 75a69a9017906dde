"""Commands at the end of a run's summary: against what the gate rejected, and to go on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlmpipe.records.decision import Decision
from vlmpipe.records.learning_curve import LearningCurve
from vlmpipe.records.stage_folders import path_in
from vlmpipe.runs.folders.marker import Marker, run_argument
from vlmpipe.runs.folders.stages import RUN_FILE_COPY
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import read_record_file

MAX_COMMAND = 60  # columns; the purpose of a longer command stands below it
# Metrics of checks that longer training does not pass.
FORGOTTEN = "retention - start"
SHARED_IMAGES = ("images_also_in_train", "images_like_train")
NOT_LEARNED = (FORGOTTEN, "questions", "relevance.mean_image_tokens")


def next_commands(folder: Path, marker: Marker, decision: Decision | None) -> list[str]:
    """The next commands after the run in `folder`, whose gate decided so; a sweep has no decision."""
    run, content = run_argument(folder), read_record_file(folder / RUN_FILE_COPY)
    commands = [*_remedies(folder, marker, decision, content), (f"vlmpipe status {run}", "this summary again")]
    data = content.get("data") or {}
    is_curve = LearningCurve.read_if_there(LocalStorage(folder)) is not None  # its file has no sweep to compile
    if not is_curve and str(data.get("source", "builtin:")).startswith("builtin:"):  # else it was their own
        commands.append(("vlmpipe run configs/llava-local.yaml", "your own LLaVA JSON, see vlmpipe docs tutorial"))
    if not is_curve:
        commands.append((f"vlmpipe compile {marker.arguments[0]}", "the same pipeline for Vertex AI"))
    short = [len(command) for command, _ in commands if len(command) <= MAX_COMMAND]
    width, below = max(short, default=0), "\n" + " " * 6
    return [
        "Next:",
        *(f"  {command:<{width}}{'   ' if len(command) <= width else below}{purpose}" for command, purpose in commands),
    ]


def _remedies(
    folder: Path, marker: Marker, decision: Decision | None, content: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Commands against what the gate rejected, with their purposes."""
    if decision is None or decision.accepted:
        return
    failed = [check.metric for check in decision.checks if not check.passed]
    shared = [metric for metric in failed if metric.rpartition(".")[2] in SHARED_IMAGES]
    if FORGOTTEN in failed:
        replays = any("replay" in source for source in (content.get("data") or {}).get("sources") or [])
        purpose = "more answers of the start: replay_images" if replays else "keep what it knew: a source replay: self"
        yield "vlmpipe docs bring-your-own-data", purpose
    if shared:
        yield f"vlmpipe data audit {run_argument(folder)}", "which images are in both splits"
    if any(metric not in (*NOT_LEARNED, *shared) for metric in failed):
        yield _longer(folder, marker, content), "train for longer"


def _longer(folder: Path, marker: Marker, content: dict[str, Any]) -> str:
    """The command that trains the run on, to twice its length."""
    stage = (content.get("stages") or [{}])[-1]  # which was rejected
    overrides = {name: value for name, value in (stage.get("train") or {}).items() if value is not None}
    train = {**(content.get("train") or {}), **overrides}
    field = "max_steps" if train.get("max_steps") else "epochs"
    path = path_in(stage["name"], f"train.{field}") if stage else f"train.{field}"
    command = [argument for argument in marker.command if not argument.startswith(f"{path}=")]
    return shlex.join([*command, f"{path}={2 * train.get(field, 1)}", "--run-id", folder.name])
