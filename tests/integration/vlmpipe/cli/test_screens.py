"""The screens of commands: their snapshots, their width, and that none says a thing twice."""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from tests.support.paths import ROOT
from tests.support.planner.plans import PLANNED_BY_TESTS
from tests.support.screens import SCREENS, file_of, screen_of
from tests.support.short_form import WHOLE
from vlmpipe import api
from vlmpipe.cli.views import plan as plan_view
from vlmpipe.cli.views import tables
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.printable import COLUMNS

FILES = {path.stem: path for path in sorted((ROOT / "configs").rglob("*.yaml"))}
SHIPPED = list(FILES) if WHOLE else [*PLANNED_BY_TESTS, "llava-local"]
TO_COPY = re.compile(r"^\s*(vlmpipe|gcloud) |://")
HEADING = re.compile(r"^Memory of one .*\)$|┃$")  # of a bar
MAX_WORDS = 5


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_is_its_snapshot(name: str) -> None:
    assert screen_of(name) == file_of(name).read_text(encoding="utf-8"), "if it is meant so: make golden"


def test_every_snapshot_has_a_screen() -> None:
    assert {path.stem for path in file_of("plan").parent.iterdir()} == set(SCREENS)


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_run_file_is_planned_and_checked_on_a_screen(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only lines that are copied are longer: a command, and a path or an address, which is never broken."""
    for print_screen in screens_of(name):
        lines = printed(print_screen, width, monkeypatch).splitlines()
        too_long = [line for line in lines if len(line.rstrip()) > min(width, COLUMNS) and not TO_COPY.search(line)]
        assert lines and too_long == [] and not any("…" in line for line in lines)


@pytest.mark.parametrize("name", SHIPPED)
def test_no_sentence_is_said_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the screens of `plan` and `check`, here and on Vertex AI."""
    monkeypatch.setattr(tables, "COLUMNS", 2000)  # no cell is wrapped
    monkeypatch.setattr(plan_view, "COLUMNS", 2000)
    for print_screen in screens_of(name):
        assert repeated(printed(print_screen, 2000, monkeypatch)) == []


def test_a_repeated_sentence_is_seen() -> None:
    text = "a   Kernels are small: it is on by default. More.\nb   Kernels are small: it is on by default."
    assert repeated(text) == ["Kernels are small: it is on by default"]


def screens_of(name: str) -> list[Callable[[], None]]:
    """Functions that print the plans and the check of a shipped run file."""
    config = load_run_file(FILES[name])
    plans: list[dict[str, Any]] = [api.plan(config, target).as_dict() for target in ("vertex", "local")]
    findings = api.check(config)
    return [
        *(lambda plan=plan: plan_view.print_plan_tables(plan) for plan in plans),  # type: ignore[misc]
        lambda: tables.print_findings(findings),
    ]


def printed(print_screen: Callable[[], None], width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    stream = io.StringIO()
    for module in (tables, plan_view):
        monkeypatch.setattr(module, "standard_output", lambda: Console(file=stream, width=width, highlight=False))
    with contextlib.redirect_stdout(stream):
        print_screen()
    return stream.getvalue()


def repeated(text: str) -> list[str]:
    """Sentences of more than MAX_WORDS words that the text has more than once; cells of a table part sentences too."""
    cells = [cell for line in text.splitlines() if not HEADING.search(line) for cell in re.split(r"\s{2,}", line)]
    sentences = [sentence.strip(" .·") for cell in cells for sentence in re.split(r"(?<=\.)\s", cell)]
    counts = Counter(sentence for sentence in sentences if len(sentence.split()) > MAX_WORDS)
    return [sentence for sentence, number in counts.items() if number > 1]
