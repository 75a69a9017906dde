"""Tables in a terminal of 80 columns and less."""

from __future__ import annotations

import ast
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from tests.support.paths import ROOT
from vlmpipe.cli.views.tables import Grid, ruled_table, show, standard_output
from vlmpipe.trainer.printable import columns

RUNS = ("llava-local-20260301-120000", "llava-local-20260301-120001")


@pytest.mark.parametrize("width", [30, 50, 80])
def test_the_end_of_a_name_is_not_cut_off(width: int) -> None:
    table = ruled_table("run", "exact_match", "difference", right=("exact_match",))
    for run in RUNS:
        table.add_row(run, "0.5 (0.4 to 0.6)", "0.01 (-0.02 to 0.03)")
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    assert "…" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("terminal", "width"), [("160", 100), ("80", 80), ("", 100)])
def test_a_screen_is_at_most_100_columns_wide(terminal: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a wide terminal, in a narrow one and in a pipe, which has no width."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: bool(terminal), raising=False)
    monkeypatch.setenv("COLUMNS", terminal or "160")
    monkeypatch.setenv("TERM", "xterm")
    assert (standard_output().width, columns()) == (width, width)


def test_text_is_broken_at_spaces_and_an_address_stays_whole() -> None:
    address = f"gs://bucket/{'long/' * 20}mix.json"
    rows = Grid(columns=2)
    rows.add_row("data", Text(f"{'word ' * 30}{address} is read", style="red"))
    console = Console(width=80, file=io.StringIO())
    show(console, rows, f"{address} and {'more ' * 30}")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line for line in lines if len(line) > 80] == [f"     {address}", address]
    assert all(line.startswith(("data ", "     ")) for line in lines[: lines.index(address)])


def test_no_column_of_a_table_cuts_its_text() -> None:
    """One that may not wrap says so; every other continues below."""
    cut = []
    for path in (ROOT / "vlmpipe/cli/views").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_column" and node.args:
                words = {word.arg: word.value for word in node.keywords}
                if "overflow" not in words and Path(path).stem not in ("plan", "memory_bar"):  # of numbers alone
                    cut.append(f"{path.name}:{node.lineno}")
    assert cut == []
