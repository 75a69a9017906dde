"""Decisions have one template, and no text names one that is not there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.paths import ROOT, files_of_repository

FOLDER = ROOT / "docs/decisions"
DECISIONS = {path.name[:4]: path for path in FOLDER.glob("[0-9]*.md")}
TEMPLATE = "0000"
SUFFIXES = ("*.md", "*.py", "*.yaml", "*.toml", "*.j2", "*Dockerfile", "Makefile")
NAMED = re.compile(r"decisions/(\d{4})|\]\((\d{4})-[a-z]|\b[Dd]ecisions? (\d{2,4})\b")


def test_a_decision_follows_the_template() -> None:
    def follows(number: str) -> bool:
        title, _, body = DECISIONS[number].read_text(encoding="utf-8").partition("\n\n")
        is_titled = re.fullmatch(rf"# {number}: Use [^\n]+[^.\n]", title) is not None
        return is_titled and body.startswith("**Chosen.**") and "\n**Why.**" in body

    assert [number for number in sorted(set(DECISIONS) - {TEMPLATE}) if not follows(number)] == []


def test_the_index_lists_every_decision_by_its_title() -> None:
    listed = re.findall(r"^\| (\d{4}) \| \[(.+)\]\((.+)\) \|$", (FOLDER / "README.md").read_text("utf-8"), re.MULTILINE)
    titles = {number: path.read_text("utf-8").partition("\n")[0] for number, path in DECISIONS.items()}
    expected = [(number, titles[number][8:], DECISIONS[number].name) for number in sorted(titles) if number != TEMPLATE]
    assert listed == expected


def named_in(text: str) -> set[str]:
    """The numbers of decisions that a text names, with four digits."""
    return {next(filter(None, numbers)).zfill(4) for numbers in NAMED.findall(text)}


def test_a_reference_is_recognized() -> None:
    text = "(decision 42), docs/decisions/0097 and [why](../decisions/0031-x.md) or [this](0011-y.md)"
    assert named_in(text) == {"0042", "0097", "0031", "0011"}


def test_no_text_names_a_decision_that_is_not_there() -> None:
    paths = [path for path in files_of_repository(*SUFFIXES) if path != Path(__file__)]
    dead = {path: named_in(path.read_text(encoding="utf-8")) - DECISIONS.keys() for path in paths}
    assert {path: numbers for path, numbers in dead.items() if numbers} == {}
