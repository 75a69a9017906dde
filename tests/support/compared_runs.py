"""Evaluated runs with given answers, and their comparison."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from vlmpipe.comparison.compare import Comparison, compare
from vlmpipe.comparison.sides import read_sides
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import seal_lines, write_record

Answers = Sequence[tuple[str, str, str]]  # id of the sample, expected, predicted


@functools.cache
def run_file() -> RunConfig:
    return load_run_file(ROOT / "configs/digits.yaml")


def make(root: Path, name: str, answers: Answers, images: int = 0, **records: dict[str, Any]) -> Path:
    """An evaluated run under `root`: answers in two slices, and other records in place of the usual ones.

    images: that samples share in turn; 0: each sample has one of its own.
    """
    folder, lines = root / "runs" / name, []
    for turn, (sample, answer, said) in enumerate(answers):
        place = {"id": sample, "turn": turn, "slice": "count" if answer == "two" else "colour", "question": "What?"}
        place["image_group"] = f"image-{turn % images}" if images else f"image of {sample}"
        lines.append(place | {"answer": answer, "prediction": said, "correct": answer == said})
    store = open_storage(str(folder))
    store.write("predictions.jsonl", seal_lines(lines))
    usual = {
        "run": run_file().to_run_json(RunPaths(run_id=name, root_uri=str(root))),
        "evaluate": {"questions": len(lines)},
        "prepared": {"prepared_uri": str(root / "none"), "features_uri": "", "features": "off"},
    }
    for file, record in (usual | records).items():
        write_record(store, f"{file}.json", record)
    return folder


def compared(root: Path, *names: str) -> Comparison:
    return compare(read_sides(names, str(root)))
