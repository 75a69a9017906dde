"""The memory of one device as a bar with a legend, for a terminal.

Each segment of the bar repeats its letter, in the segment's own colour on the same colour: a solid block in a terminal
with colours, and still readable in a file without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.table import Table
from rich.text import Text

from vlmpipe.cli.views.amounts import UNKNOWN
from vlmpipe.cli.views.tables import ruled_table
from vlmpipe.records.plan import MemoryPart
from vlmpipe.records.plan_json import MemoryJson
from vlmpipe.report.plan_section import merged_parts

GIB = 2**30
COLORS = ("blue", "cyan", "green", "yellow", "magenta", "red", "white")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SPARE, MARK = "·", "┃"


def cells(sizes: Sequence[int], scale: int, width: int) -> list[int]:
    """Characters of each segment in a bar of `width` for `scale` bytes. Ends are rounded, so errors do not add up."""
    ends, end = [0], 0
    for size in sizes:
        end += size
        ends.append(round(width * end / scale))
    return [after - before for before, after in pairwise(ends)]


def memory_bar(memory: MemoryJson, width: int) -> list[Text | Table]:
    """The bar, the mark of the capacity under it, and the legend."""
    parts = merged_parts([MemoryPart.model_validate(part) for part in memory["parts"]])
    total, capacity = memory["total_bytes"], memory["capacity_bytes"]
    lengths = cells([part.bytes for part in parts], max(total, capacity, 1), width)
    bar = Text(no_wrap=True)
    for (letter, color), length in zip(_looks(), lengths, strict=False):
        if length:
            bar.append(letter, style=f"black on {color}")
            bar.append(letter * (length - 1), style=f"{color} on {color}")
    bar.append(SPARE * (width - len(bar)), style="dim")
    lines: list[Text | Table] = [bar]
    if capacity:
        place = cells([capacity], max(total, capacity), width)[0]
        label = f"{capacity / GIB:,.1f} GiB on the device"
        style = "bold" if total <= capacity else "bold red"
        left = f"{label} {MARK}" if place > len(label) + 1 else f"{MARK} {label}"
        lines.append(Text(" " * max(0, place - (len(left) if left.endswith(MARK) else 1)) + left, style, no_wrap=True))
    return [*lines, _legend(parts, total)]


def share_text(share: float) -> str:
    """A share in per cent; a small one is not called 0."""
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def _legend(parts: Sequence[MemoryPart], total: int) -> Table:
    table = ruled_table("", "memory", "GiB", "share", right=("GiB", "share"), wrap=False)
    table.add_column("")
    for (letter, color), part in zip(_looks(), parts, strict=False):
        table.add_row(
            Text(letter, style=f"black on {color}"),
            part.name,
            f"{part.bytes / GIB:,.2f}" if part.bytes >= GIB / 100 else "<0.01",
            share_text(part.bytes / max(1, total)),
            Text(part.why, style="dim"),
        )
    table.add_row("", Text("sum", style="bold"), Text(f"{total / GIB:,.2f}", style="bold"), "", "")
    return table


def _looks() -> Iterator[tuple[str, str]]:
    for number, letter in enumerate(LETTERS):
        yield letter, COLORS[number % len(COLORS)]


def memory_text(memory: MemoryJson | None) -> Text:
    """Planned and available memory of a GPU, in a table's cell."""
    if memory is None:
        return Text(UNKNOWN)
    text = f"{memory['total_bytes'] / GIB:,.1f} of {memory['capacity_bytes'] / GIB:,.1f} GiB"
    return Text(text) if memory["fits"] else Text(f"{text}, does not fit", style="bold red")
