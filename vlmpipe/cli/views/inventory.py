"""Tables of the runs of a folder, and what a removal takes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from rich.text import Text

from vlmpipe.cli.views.tables import list_table, standard_output
from vlmpipe.inventory.listing import Listing
from vlmpipe.inventory.removal import Removal
from vlmpipe.inventory.run_folder import ListedRun, size_text
from vlmpipe.runs.live_view import LOOKS
from vlmpipe.runs.submitted import RunRecord

SHOWN_KEPT = 20


def print_listing(listing: Listing) -> None:
    """The runs, the newest last, and what is not listed; of a whole folder also what it takes."""
    console = standard_output()
    if not listing.num_runs:
        console.print(Text(f"No runs under {listing.root}. Start with: vlmpipe run configs/digits.yaml"))
        return
    if not listing.runs:
        console.print(Text(f"None of {listing.num_runs:,} runs under {listing.root} is such a run."))
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
            _size(run.size_bytes),
        )
    console.print(table)
    problems = [f"{run.run_id}: {run.problem}" for run in listing.runs if run.problem]
    for line in (*problems, *listing.problems, _sizes(listing)):
        console.print(Text(line))


def _gate(run: ListedRun) -> str:
    if run.champion:
        return run.champion.partition("@")[2]
    return "–" if run.accepted is None else "accepted" if run.accepted else "rejected"


def _size(size_bytes: int | None) -> str:
    return "–" if size_bytes is None else size_text(size_bytes)


def _sizes(listing: Listing) -> str:
    runs = sum(run.size_bytes or 0 for run in listing.runs)
    if listing.shared is None or listing.sizes is None:
        more = f"; {listing.left_out:,} older ones are not listed: --last 0 lists all" if listing.left_out else ""
        number = f"{len(listing.runs):,} of {listing.num_runs:,} runs"
        return f"{number} in {listing.root}: {size_text(runs)}{more}"
    sizes: dict[str, int | None] = {"runs": runs}
    for data in listing.shared:
        sizes[data.kind] = (sizes.get(data.kind) or 0) + (data.size_bytes or 0)
    parts = [f"{name} {_size(size)}" for name, size in (sizes | listing.sizes).items()]
    return f"{listing.num_runs:,} run{'' if listing.num_runs == 1 else 's'} in {listing.root}: {', '.join(parts)}"


def removal_lines(removal: Removal) -> list[str]:
    """Lines for what is removed, what stays and why."""
    lines = [f"remove  {run.run_id}  {_size(run.size_bytes)}" for run in removal.runs]
    lines += [f"remove  {data.kind}/{data.folder.name}  {_size(data.size_bytes)}, which no run uses"
              for data in removal.shared]  # fmt: skip
    lines += [f"remove  {path.name}, which an interrupted removal left" for path in removal.leftovers]
    lines += [f"keep    {one.run_id}: {one.reason}" for one in removal.kept[-SHOWN_KEPT:]]
    if len(removal.kept) > SHOWN_KEPT:
        lines.append(f"keep    {len(removal.kept) - SHOWN_KEPT} older runs; --json lists them with their reasons")
    lines += [f"note    {note}" for note in removal.notes]
    return [*lines, *(["nothing to remove"] if removal.is_empty else [])]


def freed_text(size_bytes: int, not_sized: int) -> str:
    """Bytes that a removal frees, such as 12.3 MB, and how many sizes were not counted."""
    rest = f", and {not_sized:,} whose size is not counted" if not_sized else ""
    return f"{size_text(size_bytes)}{rest}"


def print_submitted(submitted: Mapping[str, RunRecord], left_out: int) -> None:
    """The runs that were submitted from this folder; only the service knows their status."""
    table = list_table("submitted", "at", "planned", "to see its status")
    for name, record in submitted.items():
        planned = "–" if record.usd is None else f"${record.usd:,.2f}"
        at = f"{datetime.fromtimestamp(record.submitted_s):%m-%d %H:%M}"
        table.add_row(name, at, planned, f"vlmpipe status {name}")
    standard_output().print("", table)
    if left_out:
        standard_output().print(Text(f"{left_out:,} older ones are not listed: --last 0 lists all"))
