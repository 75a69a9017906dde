"""The tutorial on data: what it plants and types, and in the whole form the numbers that its commands print."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import blocks, command_lines, parse_vlmpipe
from tests.support.paths import ROOT
from tests.support.terminal import Terminal
from vlmpipe.config.run_config import load_run_file
from vlmpipe.records.learning_curve import LearningCurve
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.storage import open_storage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]
PAGE = ROOT / "docs/tutorials/is-my-data-good-enough.md"
PROGRAM = "examples/good_enough/make_data.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which the page's commands are typed."""
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def commands() -> list[list[str]]:
    return [shlex.split(line)[1:] for line in command_lines(PAGE) if line.startswith("vlmpipe ")]


def planted(folder: Path) -> dict[str, set[str]]:
    """Plant the faults as the page's program does. Returns the ids of each kind."""
    done = subprocess.run([sys.executable, PROGRAM], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout in blocks(PAGE, "text"), "the page has what the program prints"
    kinds = json.loads((folder / "my-data/planted.json").read_text(encoding="utf-8"))
    return {kind: set(ids) for kind, ids in kinds.items()}


def said(pattern: str) -> float:
    """The number that the page says."""
    found = re.search(pattern, " ".join(PAGE.read_text(encoding="utf-8").split()))
    assert found, pattern
    return float(found[1])


def test_the_page_names_what_its_program_plants_and_its_run_files_are_valid(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = planted(folder)
    monkeypatch.chdir(folder)
    (folder / "runs/runs/first/export").mkdir(parents=True)  # which a later run starts from
    (folder / "runs/runs/first/export/vlmpipe.json").write_text("{}")
    records = json.loads((folder / "my-data/labels.json").read_text(encoding="utf-8"))
    assert {record["id"] for record in records} >= kinds["wrong"] | kinds["copies"]
    assert f"python {PROGRAM}" in command_lines(PAGE)
    trained = {record["image"] for name in ("labels", "even") for record in _records(folder, name)}
    kept = {question["imgname"] for question in _records(folder, "kept")}
    assert len(kept) == 100 and not kept & trained, "what must not be forgotten is asked about images of no training"
    named = [arguments for arguments in commands() if any(argument.endswith(".yaml") for argument in arguments)]
    assert len(named) >= 6
    for verb, path, *rest in named:
        parse_vlmpipe([verb, path, *rest])
        load_run_file(ROOT / path, [argument for argument in rest if re.match(r"[a-z_]+(\.[a-z_]+)*=", argument)])


def _records(folder: Path, name: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((folder / f"my-data/{name}.json").read_text(encoding="utf-8"))
    return records


@pytest.mark.slow
def test_its_commands_print_its_numbers(folder: Path) -> None:
    kinds = planted(folder)
    for arguments in commands():
        with Terminal(folder, *arguments) as terminal:
            answer = terminal.answer(deadline_s=1800)
        assert answer.code == 0, (arguments, answer.said[-3000:])
    listed = {json.loads(line)["id"] for line in (folder / "audit/exclusions.jsonl").read_text().splitlines()}
    assert len(listed & kinds["wrong"]) == pytest.approx(said(r"(\d+) of the 45 wrong labels"), abs=6)
    measured = Evaluation.read(open_storage(str(folder / "runs/runs/first")))
    assert measured.exact_match == pytest.approx(said(r"`first` answers ([\d.]+) %") / 100, abs=0.08)
    slices = {one.value: one for one in measured.by_field["pen"].slices}
    assert min(slices, key=lambda pen: slices[pen].exact_match) == "pencil"
    of_questions = slices["pencil"].questions / sum(one.questions for one in slices.values())
    assert slices["pencil"].share_of_errors > 1.5 * of_questions
    excluded = [name for name in kinds["copies"] if {name, name.replace("again", "scan")} & listed]
    assert len(excluded) == pytest.approx(said(r"(\d+) of the 27 copies"), abs=3)
    curve = LearningCurve.read(open_storage(str(folder / "runs/runs/more")))
    largest = curve.points[-1].score
    assert largest and largest.value == pytest.approx(said(r"100 % 740 1 ([\d.]+) %") / 100, abs=0.08)
    assert curve.checked and curve.checked.is_inside
    start, both = (Evaluation.read(open_storage(str(folder / "runs/runs" / run))).start for run in ("even", "both"))
    assert start and start.retention and start.after is not None and start.retention.after is not None
    assert start.after == pytest.approx(said(r"`even` answers ([\d.]+) % of the new") / 100, abs=0.1)
    assert start.retention.after == pytest.approx(said(r"and ([\d.]+) % of the old") / 100, abs=0.15)
    assert both and both.retention and both.retention.after is not None
    assert both.retention.after == pytest.approx(said(r"and still ([\d.]+) % of the old") / 100, abs=0.15)
