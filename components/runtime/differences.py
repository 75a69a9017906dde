"""Shows how a run's settings differ from the compiled pipeline's: in the log, in the report and in status."""

from __future__ import annotations

from vlmpipe.config.overrides import Differences, difference_rows
from vlmpipe.trainer.progress import Progress

SHOWN_IN_NOTE = 6


def record_differences(progress: Progress, differences: Differences) -> None:
    """Print every difference, and leave it in the record of the step resolve-run, which the report reads."""
    rows = difference_rows(differences)
    if not rows:
        print("the settings are those of the compiled pipeline", flush=True)
        return
    lines = [f"{field} is {now}, compiled with {was}" for field, was, now in rows]
    count = "1 setting differs" if len(lines) == 1 else f"{len(lines)} settings differ"
    print("\n".join([f"{count} from the compiled pipeline:", *(f"  {line}" for line in lines)]), flush=True)
    more = len(lines) - SHOWN_IN_NOTE
    text = "; ".join(lines[:SHOWN_IN_NOTE]) + (f"; and {more} more, in the report" if more > 0 else "")
    note = f"{count} from the compiled pipeline: {text}"
    progress.update(0, notes=[note], changed_settings=[list(row) for row in rows])
