"""Shows how a run's settings differ from the compiled pipeline's, and from those of the run's last start.

In the log of resolve-run, in the report and as notes of status.
"""

from __future__ import annotations

from collections.abc import Sequence

from vlmpipe.runs.setting_differences import Differences, difference_rows
from vlmpipe.trainer.progress import Progress

SHOWN_IN_NOTE = 6


def record_differences(progress: Progress, differences: Differences, since_last_start: Sequence[str]) -> None:
    """Print every difference, and leave it in the record of the step resolve-run, which status and the report read."""
    rows = difference_rows(differences)
    lines = [f"{field} is {now}, compiled with {was}" for field, was, now in rows]
    notes = [_said(f"{_count(lines)} from the compiled pipeline", lines)] if lines else []
    if since_last_start:
        notes.append(_said(f"{_count(since_last_start)} from the last start of this run", since_last_start))
    if not notes:
        print("the settings are those of the compiled pipeline", flush=True)
        return
    progress.update(0, notes=notes, changed_settings=[list(row) for row in rows])


def _count(lines: Sequence[str]) -> str:
    return "1 setting differs" if len(lines) == 1 else f"{len(lines)} settings differ"


def _said(first: str, lines: Sequence[str]) -> str:
    """Print all lines. Returns them as a note."""
    print("\n".join([f"{first}:", *(f"  {line}" for line in lines)]), flush=True)
    more = len(lines) - SHOWN_IN_NOTE
    return f"{first}: {'; '.join(lines[:SHOWN_IN_NOTE])}{f'; and {more} more, in the log' if more > 0 else ''}"
