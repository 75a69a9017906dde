"""Live view of a run: a table in a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from vlmpipe.runs.run_state import RunState, clock, remaining
from vlmpipe.runs.steps import Step

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Between lines of a running step: a twentieth of its time so far, within these.
SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 5.0, 60.0
BAR_WIDTH = 24
LOOKS = {  # state -> (sign, style)
    "waiting": ("·", "dim"),
    "running": ("▸", "bold cyan"),
    "done": ("✓", "green"),
    "reused": ("✓", "green"),
    "failed": ("✗", "bold red"),
    "stopped": ("■", "yellow"),
    "skipped": ("–", "dim"),
}


class View(Protocol):
    """Shows a run's state; `close` leaves the last one on the screen."""

    def update(self, state: RunState) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def short_number(value: float) -> str:
    """A number in a few characters: 512, 5.1k, 51k, 1.2M."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            scaled = value / limit
            return f"{scaled:.1f}{unit}" if abs(scaled) < 10 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"


def progress_text(step: Step, state: RunState) -> str:
    """Progress of a running step in one line: `step 120/300 · loss 0.412 · 5.1k tokens/s · ETA 0:32`."""
    parts = []
    if step.name == "train" and state.metrics:
        parts.append(f"step {step.done:.0f}/{step.total:.0f}" if step.total else f"step {step.done:.0f}")
        parts += _numbers(state)
    elif step.total:
        parts.append(f"{step.done:,.0f}/{step.total:,.0f} {step.unit}".rstrip())
    elif step.done:
        parts.append(f"{step.done:,.0f} {step.unit}".rstrip())
    eta_s = state.train_eta_s if step.name == "train" else step.eta_s
    if eta_s is not None and step.state == "running":
        parts.append(f"ETA {remaining(eta_s)}")
    if step.message and (step.name != "train" or not parts):
        parts.append(step.message)
    return " · ".join(parts)


def _numbers(state: RunState) -> list[str]:
    loss, speed = state.metrics.get("loss"), state.metrics.get("tokens_per_s")
    texts = []
    if isinstance(loss, int | float):
        texts.append(f"loss {loss:.3f}")
    if isinstance(speed, int | float):
        texts.append(f"{short_number(speed)} tokens/s")
    return texts


def line_of(step: Step, state: RunState) -> str:
    """One step as a line of plain text."""
    text = progress_text(step, state) if step.state == "running" else step.message
    took = f" {clock(step.elapsed_s)}" if step.state in ("done", "reused", "failed", "stopped") else ""
    return f"{step.title}: {step.state}{took}{'. ' if text else ''}{text}"


def _interval_s(step: Step) -> float:
    return min(LONGEST_INTERVAL_S, max(SHORTEST_INTERVAL_S, step.elapsed_s / 20))


class PlainView:
    """Prints a line for each change of state, and one for the running step from time to time."""

    def __init__(self, write: Callable[[str], None], *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock_s = write, clock_s
        self._states: dict[str, str] = {}
        self._printed_s = clock_s()
        self._last = ""

    def update(self, state: RunState) -> None:
        for step in state.steps:
            if self._states.get(step.title, "waiting") != step.state:
                self._states[step.title] = step.state
                self._print(line_of(step, state))
        running = [step for step in state.steps if step.state == "running"]
        if running and self._clock_s() - self._printed_s >= _interval_s(running[-1]):
            self._print(line_of(running[-1], state))

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        self._printed_s = self._clock_s()
        if line != self._last:  # a step that does not move needs no second line
            self._last = line
            self._write(line)


class LiveView:
    """A table that redraws itself in a terminal."""

    def __init__(self, console: Console, *, refresh_per_second: float = 2) -> None:
        from rich.live import Live

        self._console = console
        self._started_s = time.monotonic()
        self._note = ""
        self._state: RunState | None = None
        self._live = Live(console=console, refresh_per_second=refresh_per_second, get_renderable=self._render)
        self._live.start()

    def update(self, state: RunState) -> None:
        self._state = state

    def note(self, text: str) -> None:
        self._note = text

    def close(self) -> None:
        self._note = ""
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.constrain import Constrain

        if self._state is None:
            return ""
        table = render(self._state, elapsed_s=time.monotonic() - self._started_s, note=self._note)
        # Room for the ^C that the terminal writes at the end: in the last column it would break the line.
        return Constrain(table, max(1, self._console.width - 3))


def view_for(*, plain: bool, say: Callable[[str], None]) -> View:
    """A live table in a terminal; lines by `say` elsewhere or for `plain`."""
    if plain or not sys.stdout.isatty():
        return PlainView(say)
    from vlmpipe.runs.terminal import TerminalConsole

    return LiveView(TerminalConsole())


def render(state: RunState, *, elapsed_s: float | None = None, note: str = "", starts: bool = False) -> RenderableType:
    """A run as a table: one line a step, with a progress bar. `starts` adds the start times, in local time."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def rows() -> Table:
        table = Table.grid(padding=(0, 1), expand=True)
        for width in (1, max((len(step.title) for step in state.steps), default=0), max(map(len, LOOKS))):
            table.add_column(min_width=width, no_wrap=True)
        for _ in range(1 + starts):
            table.add_column(min_width=7, justify="right", no_wrap=True)
        # A live table keeps its number of lines; a status is read in full.
        table.add_column(ratio=1, no_wrap=not starts, overflow="fold" if starts else "ellipsis")
        return table

    table = rows()
    lines: list[RenderableType] = [table]
    for step in state.steps:
        sign, style = LOOKS.get(step.state, ("?", ""))
        took = "" if step.state in ("waiting", "skipped") else clock(step.elapsed_s)
        text = progress_text(step, state) if step.state == "running" else step.message
        style_of_text = "red" if step.state == "failed" else "dim" if step.state != "running" else ""
        what: RenderableType = Text(text, style=style_of_text)
        below = None
        if step.state == "running" and step.total:
            bar = ProgressBar(total=1.0, completed=step.share, width=BAR_WIDTH)
            if step.name == "train":  # its text is long: it gets a line for itself
                what, below = bar, what
            else:
                what = Table.grid(padding=(0, 1))
                what.add_column(min_width=BAR_WIDTH)
                what.add_column(no_wrap=True, overflow="ellipsis")
                what.add_row(bar, Text(text))
        began = f"{datetime.fromtimestamp(step.started_s):%d %b %H:%M:%S}" if step.started_s else ""
        times = [began, took] if starts else [took]
        table.add_row(*(Text(text, style=style) for text in (sign, step.title, step.state)), *times, what)
        if below:
            table = rows()
            lines += [Padding(below, (0, 0, 0, 2)), table]
    if elapsed_s is not None:
        lines.insert(0, Text(f"{state.run_id} · {clock(elapsed_s)}", style="bold"))
    if note:
        lines.append(Text(note, style="yellow"))
    return Group(*lines)
