"""The commands at the end of a summary: what helps against what the gate rejected."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs_root import write_run
from vlmpipe.records.decision import Check, Decision
from vlmpipe.runs.folders.marker import Marker, require_marker
from vlmpipe.runs.folders.next_commands import next_commands
from vlmpipe.runs.folders.stages import RUN_FILE_COPY
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record


def test_a_long_next_command_leaves_the_others_in_their_columns(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a")
    marker = dataclasses.replace(require_marker(folder), arguments=(f"{'x' * 80}.yaml",))
    lines = next_commands(folder, marker, None)
    assert not any(" " * 60 in line for line in lines), "padded to the long one"
    assert any(line.endswith("\n      the same pipeline for Vertex AI") for line in lines)


@pytest.mark.parametrize(
    ("metrics", "sources", "expected"),
    [
        ([], [], []),
        (["exact_match"], [], ["train for longer"]),
        (["exact_match - champion", "questions"], [], ["train for longer"]),
        (["questions"], [], []),
        (["retention - start"], [{"uri": "x.json"}], ["keep what it knew: a source replay: self"]),
        (["retention - start"], [{"replay": "self"}], ["more answers of the start: replay_images"]),
        (["benchmarks.mm.images_like_train"], [], ["which images are in both splits"]),
        (
            ["exact_match", "images_also_in_train", "retention - start"],
            [],
            ["keep what it knew: a source replay: self", "which images are in both splits", "train for longer"],
        ),
    ],
)
def test_a_rejected_run_is_told_what_helps(
    tmp_path: Path, metrics: list[str], sources: list[dict[str, str]], expected: list[str]
) -> None:
    folder = write_run(tmp_path, "a")
    write_record(LocalStorage(folder), RUN_FILE_COPY, {"data": {"sources": sources}, "train": {"epochs": 3}})
    checks = [Check(name=metric, metric=metric, passed=False, why="") for metric in metrics]
    passed = Check(name="loss", metric="loss", passed=True, why="")
    lines = next_commands(folder, require_marker(folder), Decision(accepted=False, reason="", checks=(*checks, passed)))
    purposes = [line.split("  ")[-1].strip() for line in lines]
    assert purposes[1 : purposes.index("this summary again")] == expected
    assert ("train.epochs=6" in "".join(lines)) == ("train for longer" in expected)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"train": {"epochs": 3}}, "train.epochs=6"),
        ({"train": {"max_steps": 10, "epochs": 1}}, "train.max_steps=20"),
        (
            {"train": {"epochs": 3}, "stages": [{"name": "a"}, {"name": "b", "train": {"max_steps": 5}}]},
            "stages.b.train.max_steps=10",
        ),
        ({"train": {"epochs": 3}, "stages": [{"name": "a", "train": {"epochs": 1}}, {"name": "b"}]},
         "stages.b.train.epochs=6"),
    ],
)  # fmt: skip
def test_training_for_longer_names_a_field_that_counts(content: dict[str, Any], field: str, tmp_path: Path) -> None:
    (tmp_path / RUN_FILE_COPY).write_text(json.dumps(content), encoding="utf-8")
    marker = Marker("run", "d", ("mine.yaml",), 0.0)
    failed = Check(name="c", metric="exact_match", passed=False, why="")
    _, command, *_ = next_commands(tmp_path, marker, Decision(accepted=False, reason="", checks=(failed,)))
    assert command.split()[:4] == ["vlmpipe", "run", "mine.yaml", field]
