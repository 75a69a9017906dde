"""Tables of a comparison of runs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from vlmpipe.cli.views.tables import Grid, ruled_table, show, standard_output
from vlmpipe.comparison.compare import Comparison
from vlmpipe.comparison.usage_figures import NOT_RECORDED, usage_figures
from vlmpipe.report.start_section import start_rows

SHORT_VERDICTS = {"no difference shown": "none shown", "too few images": "few images"}
MAX_NAME = 80  # characters of a value, of which a record may have any number
VERDICT_STYLES = {"better": "green", "worse": "red"}


def print_comparison(comparison: Comparison, screen: Console | None = None) -> None:
    """Print differing settings, scores over all questions and by slice, agreement, time and cost.

    `screen`: where to; by default standard output.
    """
    screen = screen or standard_output()
    show(screen, *_blocks_of(comparison))


def _blocks_of(comparison: Comparison) -> Iterator[RenderableType]:
    first = comparison.sides[0].name
    yield from _decision(comparison)
    yield Text(f"{comparison.questions:,} questions that all runs were asked; compared with {first}\n")
    yield from _settings(comparison)
    yield from _scores(comparison)
    yield from _by_field(comparison)
    yield from _starts(comparison)
    table = ruled_table("right on", "both", f"only {first}", "only this run", "neither", right=("both",))
    for agreement in comparison.agreement:
        counts = (agreement.both_right, agreement.only_first, agreement.only_this, agreement.both_wrong)
        table.add_row(agreement.run, *(f"{count:,}" for count in counts))
    yield table
    yield ""
    yield from _usage(comparison)
    for note in comparison.notes:
        yield Text(f"note: {note}")


def _decision(comparison: Comparison) -> Iterator[Text]:
    """The verdict of the first score over all questions, a line for each run but the first."""
    score = comparison.scores[0]
    first, *others = score.runs
    for run in others:
        assert run.difference is not None, "only the first run differs from none"
        low, high = run.difference_interval or (None, None)
        between = "" if low is None else f" ({low:+.3f} to {high:+.3f})"
        figures = f"{score.metric} {run.value:.3f} against {first.value:.3f}, {run.difference:+.3f}{between}"
        yield Text(f"{run.run}: {run.verdict}: {figures}", style=f"bold {VERDICT_STYLES.get(run.verdict, '')}".strip())


def _usage(comparison: Comparison) -> Iterator[RenderableType]:
    """Time, cost and tokens of each run, as far as they are recorded."""
    for side in comparison.sides:
        figures = {name: text for name, text in usage_figures(side.usage).items() if text != NOT_RECORDED}
        rows = Grid(columns=2)
        for name, text in (figures or {"Time, cost, tokens": "not recorded"}).items():
            rows.add_row(f"  {name}", text)
        yield Text(side.name)
        yield rows


def _by_field(comparison: Comparison) -> Iterator[RenderableType]:
    """The values whose difference is beyond chance, or the number of those that were compared."""
    if not comparison.by_field:
        return
    shown = [line for line in comparison.by_field if line.verdict in VERDICT_STYLES]
    if shown:
        table = ruled_table("by field", "run", "questions", "differs", "verdict", right=("questions", "differs"))
        for line in shown:
            name = Text(textwrap.shorten(f"{line.field}: {line.value}", MAX_NAME, placeholder=" ..."))
            cells = (f"{line.questions:,}", f"{line.difference:+.3f}", line.verdict)
            table.add_row(name, Text(line.run), *cells, style=VERDICT_STYLES[line.verdict])
        yield table
    left = len(comparison.by_field) - len(shown)
    if left:
        yield f"{left:,} values of fields (data.slices) with no difference shown: --json and the page have them"
    yield ""


def _starts(comparison: Comparison) -> Iterator[RenderableType]:
    """Each run beside the weights that it started from: all questions, the probe, and slices that differ."""
    right = ("questions", "before", "after")
    table = ruled_table("since its start", "questions", "before", "after", "differs by", right=right)
    left, has_rows = 0, False
    for side in comparison.sides:
        rows = start_rows(side.evaluation)
        shown = [part for part in rows if part.verdict in ("", *VERDICT_STYLES)]
        left, has_rows = left + len(rows) - len(shown), has_rows or bool(rows)
        if shown:
            table.add_row(Text(side.name))
        for part in shown:
            name = Text(textwrap.shorten(f"  {part.part}", MAX_NAME, placeholder=" ..."))
            between = f"{part.difference:+.3f} ({part.interval[0]:+.3f} to {part.interval[1]:+.3f})"
            style = VERDICT_STYLES.get(part.verdict, "")
            table.add_row(name, f"{part.questions:,}", f"{part.before:.3f}", f"{part.after:.3f}", between, style=style)
    if not has_rows:
        return
    yield table
    if left:
        yield f"{left:,} slices with no difference shown since the start: --json and the page have them"
    yield ""


def _settings(comparison: Comparison) -> Iterator[RenderableType]:
    if not comparison.settings:
        yield "Settings, prepared data and packages of these runs are equal.\n"
        return
    table = ruled_table("differs in", *(side.name for side in comparison.sides))
    for line in comparison.settings:
        table.add_row(*map(Text, (line.field, *line.values)))
    yield table
    yield ""


def _scores(comparison: Comparison) -> Iterator[RenderableType]:
    """A line for each run below that of its score, so that ids of runs fit on a terminal of 80 columns."""
    rows = [line for line in comparison.scores if not line.slice or line.metric == "exact_match"]
    table = ruled_table("score", "value", "differs", "95 %", "verdict", right=("value", "differs"))
    for line in [*rows, *comparison.benchmarks]:
        score = (
            line.metric
            if not line.slice
            else line.slice
            if line.metric == "exact_match"
            else f"{line.slice}: {line.metric}"
        )
        table.add_row(Text(f"{score}, {line.questions:,} questions"))
        if line.baseline is not None:
            table.add_row("  majority baseline", f"{line.baseline:.3f}")
        for run in line.runs:
            is_first = run.difference is None
            between, sign = (run.interval, "") if is_first else (run.difference_interval, "+")
            table.add_row(
                Text(f"  {run.run}"),
                f"{run.value:.3f}",
                "" if run.difference is None else f"{run.difference:+.3f}",
                f"{between[0]:{sign}.3f} to {between[1]:{sign}.3f}" if between else "–",
                SHORT_VERDICTS.get(run.verdict, run.verdict),
                style=VERDICT_STYLES.get(run.verdict, ""),
            )
    yield table
    yield ""
