"""What a notebook shows: the command line's screens, and a run's page in a frame that reaches nothing."""

from __future__ import annotations

import html
import importlib
from pathlib import Path
from types import SimpleNamespace

import IPython
import pytest
from IPython.core.formatters import DisplayFormatter

from tests.support.compared_runs import compared, make
from tests.support.paths import ROOT
from tests.support.runs_root import write_run
from vlmpipe.cli.notebook.display import FORMS, LARGEST_PAGE, show_in_notebooks
from vlmpipe.config.run_config import load_run_file
from vlmpipe.planner.plan import plan_run
from vlmpipe.runs.folders.summary import report_of
from vlmpipe.trainer.printable import COLUMNS


@pytest.fixture
def formatter(monkeypatch: pytest.MonkeyPatch) -> DisplayFormatter:
    """IPython's, after the import of vlmpipe in a notebook."""
    made = DisplayFormatter()
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(display_formatter=made))
    show_in_notebooks()
    return made


def shown(formatter: DisplayFormatter, value: object) -> tuple[str, str]:
    """The text and the HTML of a cell that ends with the value."""
    data, _ = formatter.format(value)
    return data["text/plain"], data["text/html"]


def test_each_class_is_where_its_name_says() -> None:
    for module, name in FORMS:
        assert getattr(importlib.import_module(module), name).__module__ == module


def test_without_a_notebook_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    show_in_notebooks()


def test_a_plan_is_the_screen_of_the_command(formatter: DisplayFormatter) -> None:
    text, page = shown(formatter, plan_run(load_run_file(ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml")))
    assert "Fits:" in text and "$" in text and max(map(len, text.splitlines())) <= COLUMNS
    assert page.startswith("<pre") and page.endswith("</pre>") and "<span" in page, "with its colours"


def test_a_comparison_is_the_screen_of_the_command_and_its_texts_are_no_tags(
    formatter: DisplayFormatter, tmp_path: Path
) -> None:
    answers = [(f"s{number}", "red", "red") for number in range(20)]
    make(tmp_path, "first", answers)
    make(tmp_path, "<b>second", answers)
    text, page = shown(formatter, compared(tmp_path, "first", "<b>second"))
    assert "20 questions that all runs were asked" in text and "<b>second" in text
    assert "<b>" not in page and "&lt;b&gt;second" in page


def test_a_run_shows_its_report_in_a_frame_without_rights(formatter: DisplayFormatter, tmp_path: Path) -> None:
    run = report_of(write_run(tmp_path, "a"))
    text, page = shown(formatter, run)
    assert text.strip() and "<iframe" not in page, "without a report its lines alone"
    report = '<p class="x">\'</p><script>parent.document.title = "&"</script>'
    (run.folder / "report.html").write_text(report)
    page = shown(formatter, run)[1]
    head, frame = page.split("<iframe ")
    assert head.startswith("<pre") and 'sandbox="allow-scripts"' in frame and "allow-same-origin" not in frame
    assert html.unescape(frame.split('srcdoc="')[1].split('"')[0]) == report
    with (run.folder / "report.html").open("ab") as file:
        file.truncate(LARGEST_PAGE + 1)
    assert "<iframe" not in shown(formatter, run)[1] and "16 MiB" in shown(formatter, run)[1]
