"""A plan's memory for a terminal: one device as a bar with a legend, its host, and the other jobs.

Each segment of the bar repeats its letter, in the segment's own colour on the same colour: a solid block in a terminal
with colours, and still readable in a file without.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from vlmpipe.catalog.this_machine import NAME as THIS_MACHINE
from vlmpipe.cli.views.amounts import UNKNOWN
from vlmpipe.cli.views.tables import ruled_table
from vlmpipe.config.overrides import override_texts
from vlmpipe.records.plan import MemoryPart
from vlmpipe.records.plan_json import JobMemoryJson, MemoryJson
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
    bar = Text(no_wrap=True, overflow="ignore")
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


def memory_blocks(memory: MemoryJson, width: int) -> Iterator[RenderableType]:
    """The bar of the fullest device."""
    yield ""
    yield Text(f"Memory of one {memory['device']}, at its peak ({memory['moment']})", style="bold")
    yield from memory_bar(memory, width)


def host_lines(memory: MemoryJson) -> Iterator[tuple[str, Text]]:
    """Names and lines of the host's memory, while training and at the start."""
    for host, when in ((memory["host"], "while training"), (memory["start"], "at the start")):
        if host:
            names = ", ".join(part["name"] for part in host["parts"])
            room = f"{host['total_bytes'] / GIB:,.1f} of {host['capacity_bytes'] / GIB:,.1f} GiB"
            is_here = host["machine"] == THIS_MACHINE
            where = "each launcher's share of this machine" if is_here else f"each {host['machine']}"
            style = "" if host["fits"] else "bold red"
            yield f"host memory {when}", Text(f"Host memory of {where} {when}: {room} ({names})", style=style)


def nearest_lines(memory: MemoryJson) -> Iterator[Text]:
    """Settings near these, and whether they fit."""
    if memory["nearest"]:
        yield Text("Settings near these:" if memory["fits"] else "Nearest settings:", style="bold")
    for setting in memory["nearest"]:
        change = shlex.join(override_texts(setting["change"]))
        fits = "fits" if setting["fits"] else "does not fit"
        text = f"  {setting['total_bytes'] / GIB:,.1f} GiB, {fits}: {change}"
        yield Text(text, no_wrap=True, overflow="ignore")  # the change is copied


def job_lines(jobs: Sequence[JobMemoryJson]) -> Iterator[tuple[str, Text]]:
    """Names and lines of the other jobs' memory."""
    for job in jobs:
        rooms = []
        if job["capacity_bytes"]:
            copies = f"each of the {job['devices']} GPUs of a copy" if job["devices"] > 1 else "each GPU"
            rooms.append(f"{job['total_bytes'] / GIB:,.1f} of {job['capacity_bytes'] / GIB:,.1f} GiB on {copies}")
        elif job["parts"]:
            rooms.append(f"{job['total_bytes'] / GIB:,.1f} GiB on a GPU of your own, or spread over several")
        if host := job["host"]:
            rooms.append(f"{host['total_bytes'] / GIB:,.1f} of {host['capacity_bytes'] / GIB:,.1f} GiB of host memory")
        name = f"memory of {job['job'].replace('_', '-')}"
        yield name, Text(f"M{name[1:]}: {', '.join(rooms)}", "" if job["fits"] else "bold red")
