"""Differences between runs in settings, prepared data and packages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlmpipe.comparison.sides import Side
from vlmpipe.runs.setting_differences import difference_rows, differences

ITS_OWN = ("run", "version")  # fields of run.json that name the run itself


@dataclass(frozen=True)
class SettingsRow:
    """A field of the run file, the prepared data or a package's version, and the value in each run."""

    field: str
    values: tuple[str, ...]


def settings_rows(sides: Sequence[Side]) -> tuple[SettingsRow, ...]:
    """Differences in the order of the run file; then prepared data, and packages that training ran with."""
    contents = [{name: value for name, value in side.settings.items() if name not in ITS_OWN} for side in sides]
    rows: dict[str, list[str]] = {}
    for number, content in enumerate(contents[1:], start=1):
        for field, first, this in difference_rows(differences(contents[0], content)):
            rows.setdefault(field, [first] * len(contents))[number] = this
    digests = [side.prepared_uri.rstrip("/").rpartition("/")[2] for side in sides]
    if len(set(digests)) > 1:
        rows["prepared data"] = digests
    for package in dict.fromkeys(name for side in sides for name in side.versions):
        of_each = [side.versions.get(package, "not recorded") for side in sides]
        if len(set(of_each)) > 1:
            rows[package] = of_each
    return tuple(SettingsRow(field, tuple(values)) for field, values in rows.items())
