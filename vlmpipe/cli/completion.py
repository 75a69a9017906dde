"""Shell completion of run files and run ids, from the names of files and folders alone."""

from __future__ import annotations

from pathlib import Path

import typer


def run_files(incomplete: str) -> list[str]:
    """YAML files in the folder typed so far and one level below."""
    folder, _, name = incomplete.rpartition("/")
    prefix = f"{folder}/" if "/" in incomplete else ""
    pattern = (f"{name}*.y*ml", f"{name}*/*.y*ml")
    found = [path.relative_to(folder or (prefix or ".")) for each in pattern for path in Path(prefix or ".").glob(each)]
    return sorted(f"{prefix}{path}" for path in found)


def run_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Runs under --root and those submitted from this folder, the newest first."""
    from vlmpipe.runs.submitted import SUBMITTED

    runs = Path(context.params.get("root") or "runs", "runs")
    found = [*runs.glob(f"{incomplete}*/"), *SUBMITTED.glob(f"{incomplete}*.json")]
    return [path.stem for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]
