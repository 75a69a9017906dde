"""Show plans, comparisons and runs in notebooks as the command line does, and the report of a run itself."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

    from vlmpipe.comparison.compare import Comparison
    from vlmpipe.planner.plan import Plan
    from vlmpipe.planner.stages import StagesPlan
    from vlmpipe.planner.sweep import SweepPlan
    from vlmpipe.runs.folders.summary import RunReport

LARGEST_PAGE = 16 << 20  # bytes of a report; a notebook's file keeps what its cells show
PAGE_HEIGHT = 600  # pixels
# `{code}` is rich's. Lines are not wrapped: columns of tables stay below each other.
SCREEN = '<pre style="white-space: pre; overflow-x: auto; line-height: 1.25">{code}</pre>'
# Scripts of the page sort and filter; without allow-same-origin they reach nothing of the notebook.
PAGE = (
    '<iframe sandbox="allow-scripts" style="width: 100%; border: 1px solid #8888" height="{height}" srcdoc="{page}">'
    "</iframe>"
)


def show_in_notebooks() -> None:
    """Register how IPython shows our results; without IPython nothing happens."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return
    formatters = shell.display_formatter.formatters
    for (module, name), (text, page) in FORMS.items():
        formatters["text/plain"].for_type_by_name(module, name, _plain(text))
        formatters["text/html"].for_type_by_name(module, name, page)


class _Pretty(Protocol):
    """The printer of texts."""

    def text(self, text: str) -> None: ...


def _plain(text: Callable[..., str]) -> Callable[[object, _Pretty, bool], None]:
    return lambda shown, printer, _cycle: printer.text(text(shown))


def _screen() -> Console:
    from vlmpipe.runs.terminal import TerminalConsole

    return TerminalConsole(highlight=False, record=True)


def _plan_screen(plan: Plan | StagesPlan | SweepPlan) -> Console:
    from vlmpipe.cli.views.plan import print_plan_tables

    screen = _screen()
    print_plan_tables(plan.as_dict(), screen)
    return screen


def _comparison_screen(comparison: Comparison) -> Console:
    from vlmpipe.cli.views.comparison import print_comparison

    screen = _screen()
    print_comparison(comparison, screen)
    return screen


def _text_of(screen: Callable[..., Console]) -> Callable[..., str]:
    return lambda shown: screen(shown).export_text().rstrip()


def _html_of(screen: Callable[..., Console]) -> Callable[..., str]:
    return lambda shown: screen(shown).export_html(inline_styles=True, code_format=SCREEN)


def _run_text(run: RunReport) -> str:
    from vlmpipe.trainer.printable import printable, wrapped

    return "\n".join(part for text in run.lines() for line in printable(text).split("\n") for part in wrapped(line))


def run_html(run: RunReport) -> str:
    """The run's last lines, and its report in a frame of its own if there is one of at most LARGEST_PAGE bytes."""
    lines = SCREEN.format(code=html.escape(_run_text(run)))
    if run.report is None:
        return lines
    size = run.report.stat().st_size
    if size > LARGEST_PAGE:
        return lines + f"<p>The report has {size >> 20} MiB and is not shown here: {html.escape(str(run.report))}</p>"
    return lines + _framed(run.report)


def _framed(page: Path) -> str:
    text = page.read_text(encoding="utf-8", errors="replace")
    return PAGE.format(height=PAGE_HEIGHT, page=html.escape(text))


# Class -> its text for terminals and its HTML. By name, as importing them takes seconds.
PLAN = (_text_of(_plan_screen), _html_of(_plan_screen))
FORMS: dict[tuple[str, str], tuple[Callable[..., str], Callable[..., str]]] = {
    ("vlmpipe.planner.plan", "Plan"): PLAN,
    ("vlmpipe.planner.stages", "StagesPlan"): PLAN,
    ("vlmpipe.planner.sweep", "SweepPlan"): PLAN,
    ("vlmpipe.comparison.compare", "Comparison"): (_text_of(_comparison_screen), _html_of(_comparison_screen)),
    ("vlmpipe.runs.folders.summary", "RunReport"): (_run_text, run_html),
}
