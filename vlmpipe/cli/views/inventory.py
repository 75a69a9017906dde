"""Tables of the runs of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from rich.text import Text

from vlmpipe.cli.views.tables import list_table, show, standard_output
from vlmpipe.inventory.listing import Listing
from vlmpipe.inventory.run_folder import ListedRun, shown_size, size_text
from vlmpipe.runs.live_view import LOOKS
from vlmpipe.runs.submitted import RunRecord


def print_listing(listing: Listing) -> None:
    """The runs, the newest last, and the number left out; of a whole folder also what it takes."""
    console = standard_output()
    if not listing.num_runs:
        show(console, Text(f"No runs under {listing.root}. Start with: vlmpipe run configs/digits.yaml"))
        return
    if not listing.runs:
        show(console, Text(f"None of {listing.num_runs:,} runs under {listing.root} is such a run."))
        return
    table = list_table("run", "started", "outcome", "accuracy", "gate", "size", right=("accuracy", "size"))
    for run in listing.runs:
        sign, style = LOOKS.get(run.outcome, ("✗", "bold red"))
        table.add_row(
            Text(run.run_id + (f" [{', '.join(run.tags)}]" if run.tags else "")),
            f"{datetime.fromtimestamp(run.started_s):%m-%d %H:%M}" if run.started_s else "–",
            Text(f"{sign} {run.outcome}", style=style),
            "–" if run.accuracy is None else f"{100 * run.accuracy:.1f} %",
            _gate(run),
            shown_size(run.size_bytes),
        )
    show(console, table)
    problems = [f"{run.run_id}: {run.problem}" for run in listing.runs if run.problem]
    for line in (*problems, *listing.problems, _sizes(listing)):
        show(console, Text(line))


def _gate(run: ListedRun) -> str:
    if run.champion:
        return run.champion.partition("@")[2]
    return "–" if run.accepted is None else "accepted" if run.accepted else "rejected"


def _sizes(listing: Listing) -> str:
    runs = sum(run.size_bytes or 0 for run in listing.runs)
    if listing.shared is None or listing.sizes is None:
        more = f"; {listing.left_out:,} older ones are not listed: --last 0 lists all" if listing.left_out else ""
        number = f"{len(listing.runs):,} of {listing.num_runs:,} runs"
        return f"{number} in {listing.root}: {size_text(runs)}{more}"
    sizes: dict[str, int | None] = {"runs": runs}
    for data in listing.shared:
        sizes[data.kind] = (sizes.get(data.kind) or 0) + (data.size_bytes or 0)
    parts = [f"{name} {shown_size(size)}" for name, size in (sizes | listing.sizes).items()]
    return f"{listing.num_runs:,} run{'' if listing.num_runs == 1 else 's'} in {listing.root}: {', '.join(parts)}"


def print_submitted(submitted: Mapping[str, RunRecord], left_out: int) -> None:
    """The runs that were submitted from this folder; only the service knows their status."""
    table = list_table("submitted", "at", "planned", "to see its status")
    for name, record in submitted.items():
        planned = "–" if record.usd is None else f"${record.usd:,.2f}"
        at = f"{datetime.fromtimestamp(record.submitted_s):%m-%d %H:%M}"
        table.add_row(name, at, planned, f"vlmpipe status {name}")
    show(standard_output(), "", table)
    if left_out:
        show(standard_output(), Text(f"{left_out:,} older ones are not listed: --last 0 lists all"))
