"""Lines for what a removal takes: plain text, so that `prune` and `rm` start without rich."""

from __future__ import annotations

from vlmpipe.inventory.removal import Removal
from vlmpipe.inventory.run_folder import shown_size, size_text

SHOWN_KEPT = 20


def removal_lines(removal: Removal) -> list[str]:
    """Lines for removed and kept data, with reasons."""
    lines = [f"remove  {run.run_id}  {shown_size(run.size_bytes)}" for run in removal.runs]
    lines += [f"remove  {data.kind}/{data.folder.name}  {shown_size(data.size_bytes)}, which no run uses"
              for data in removal.shared]  # fmt: skip
    lines += [f"remove  {path.name}, which an interrupted removal left" for path in removal.leftovers]
    lines += [f"keep    {entry.run_id}: {entry.reason}" for entry in removal.kept[-SHOWN_KEPT:]]
    if len(removal.kept) > SHOWN_KEPT:
        lines.append(f"keep    {len(removal.kept) - SHOWN_KEPT} older runs; --json lists them with their reasons")
    lines += [f"note    {note}" for note in removal.notes]
    return [*lines, *(["nothing to remove"] if removal.is_empty else [])]


def freed_text(size_bytes: int, not_sized: int) -> str:
    """Bytes that a removal frees, such as 12.3 MB, and how many sizes were not counted."""
    rest = f", and {not_sized:,} whose size is not counted" if not_sized else ""
    return f"{size_text(size_bytes)}{rest}"
