"""Tables of the runs of a folder, and what a removal takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from rich.text import Text

from vlmpipe.cli.views.tables import list_table, standard_output
from vlmpipe.inventory.listing import Inventory, ListedRun, size_text
from vlmpipe.inventory.removal import Removal
from vlmpipe.runs.live_view import LOOKS
from vlmpipe.runs.submitted import RunRecord

SHOWN_KEPT = 20


def print_inventory(inventory: Inventory, chosen: Sequence[ListedRun]) -> None:
    """The chosen runs, the newest last, and what all of the folder takes."""
    console = standard_output()
    if not inventory.runs:
        console.print(Text(f"No runs under {inventory.root}. Start with: vlmpipe run configs/digits.yaml"))
        return
    if not chosen:
        console.print(Text(f"None of {len(inventory.runs)} runs under {inventory.root} is such a run."))
        return
    table = list_table("run", "started", "outcome", "accuracy", "gate", "size", right=("accuracy", "size"))
    for run in chosen:
        sign, style = LOOKS.get(run.outcome, ("✗", "bold red"))
        table.add_row(
            Text(run.run_id + (f" [{', '.join(run.tags)}]" if run.tags else "")),
            f"{datetime.fromtimestamp(run.started_s):%m-%d %H:%M}" if run.started_s else "–",
            Text(f"{sign} {run.outcome}", style=style),
            "–" if run.accuracy is None else f"{100 * run.accuracy:.1f} %",
            _gate(run),
            size_text(run.size_bytes),
        )
    console.print(table)
    problems = [f"{run.run_id}: {run.problem}" for run in chosen if run.problem]
    for line in (*problems, *inventory.problems, _sizes(inventory)):
        console.print(Text(line))


def _gate(run: ListedRun) -> str:
    if run.champion:
        return run.champion.partition("@")[2]
    return "–" if run.accepted is None else "accepted" if run.accepted else "rejected"


def _sizes(inventory: Inventory) -> str:
    sizes = {"runs": sum(run.size_bytes for run in inventory.runs)}
    for data in inventory.shared:
        sizes[data.kind] = sizes.get(data.kind, 0) + data.size_bytes
    parts = [f"{name} {size_text(size)}" for name, size in (sizes | inventory.sizes).items()]
    number = len(inventory.runs)
    return f"{number} run{'' if number == 1 else 's'} in {inventory.root}: {', '.join(parts)}"


def removal_lines(removal: Removal) -> list[str]:
    """Print what is removed, what stays and why."""
    lines = [f"remove  {run.run_id}  {size_text(run.size_bytes)}" for run in removal.runs]
    lines += [f"remove  {data.kind}/{data.folder.name}  {size_text(data.size_bytes)}, which no run uses"
              for data in removal.shared]  # fmt: skip
    lines += [f"remove  {path.name}, which an interrupted removal left" for path in removal.leftovers]
    lines += [f"keep    {one.run_id}: {one.reason}" for one in removal.kept[-SHOWN_KEPT:]]
    if len(removal.kept) > SHOWN_KEPT:
        lines.append(f"keep    {len(removal.kept) - SHOWN_KEPT} older runs; --json lists them with their reasons")
    lines += [f"note    {note}" for note in removal.notes]
    return [*lines, *(["nothing to remove"] if removal.is_empty else [])]


def print_submitted(submitted: Mapping[str, RunRecord]) -> None:
    """The runs that were submitted from this folder; only the service knows their status."""
    table = list_table("submitted", "at", "planned", "to see its status")
    for name, record in submitted.items():
        planned = "–" if record.usd is None else f"${record.usd:,.2f}"
        at = f"{datetime.fromtimestamp(record.submitted_s):%m-%d %H:%M}"
        table.add_row(name, at, planned, f"vlmpipe status {name}")
    standard_output().print("", table)
