"""What a benchmark is doing: a bar for each part on a terminal, plain lines elsewhere. On stderr."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

QUIET_S = 10.0  # a plain line is due after so long, or when something else begins


class Progress:
    """Progress of the parts of one run. Draws only when it is called: a thread that draws would count as CPU time."""

    def __init__(self, num_parts: int) -> None:
        console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            TextColumn("{task.fields[time]}  {task.fields[at]}"),
        )
        self._bars = Bars(*columns, console=console, auto_refresh=False) if console.is_terminal else None
        self._console, self._num_parts, self._number = console, num_parts, 0
        self._name, self._at, self._task, self._said_s = "", "", TaskID(0), 0.0
        self._started_s = self._part_started_s = time.monotonic()
        if self._bars:
            self._bars.start()

    def begin(self, name: str, seconds: float, share_s: float) -> None:
        """A part begins that should take so long; with more than its share it makes the fewest rounds."""
        self._number += 1
        self._name, self._part_started_s, self._fraction = name, time.monotonic(), 0.0
        self._expected_s, self._share_s = min(seconds, share_s), share_s
        if self._bars:
            self._task = self._bars.add_task(f"{self._number}/{self._num_parts} {name}", total=1.0, time="", at="")
        self.at("begins", 0.0)

    def at(self, what: str, fraction: float | None = None) -> None:
        """What the part is doing, and how much of it is done (None: as much as before)."""
        self._fraction = self._fraction if fraction is None else fraction
        now_s = time.monotonic()
        elapsed_s = now_s - self._part_started_s
        left_s = elapsed_s * (1 / self._fraction - 1) if self._fraction else self._expected_s - elapsed_s
        left_s = min(left_s, self._share_s - elapsed_s)
        left = f"about {clock(left_s)} left" if left_s > 0 else "longer than expected"
        times = f"{clock(elapsed_s)}, {left}"
        if self._bars:
            self._bars.update(self._task, completed=self._fraction, time=times, at=what, refresh=True)
        elif what.split(":")[0] != self._at.split(":")[0] or now_s - self._said_s > QUIET_S:
            self._at, self._said_s = what, now_s
            self._line(f"{times}: {what}")

    def end(self, what: str = "done") -> None:
        """The part is over."""
        elapsed = clock(time.monotonic() - self._part_started_s)
        if self._bars:
            self._bars.update(self._task, completed=1.0, time=elapsed, at=what, refresh=True)
        else:
            self._line(f"{elapsed}, {what}")

    def close(self) -> None:
        if self._bars:
            self._bars.stop()

    def _line(self, text: str) -> None:
        elapsed = clock(time.monotonic() - self._started_s)
        self._console.print(
            f"[{elapsed}] {self._number}/{self._num_parts} {self._name}: {text}", markup=False, soft_wrap=True
        )


def clock(seconds: float) -> str:
    """As minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
