"""Fields in which the run files of runs differ. Read by `compare`, so without the run file's sections, which take long
to import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vlmpipe.config.validation_errors import MAY_HOLD_SECRETS, show

Differences = dict[str, tuple[Any, Any]]  # by dotted path: the value before and the value now, None for none


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> Differences:
    """The fields of two run files with all defaults that differ."""
    was, now = dict(_values(before)), dict(_values(after))
    paths = dict.fromkeys([*was, *now])
    return {path: (was.get(path), now.get(path)) for path in paths if was.get(path) != now.get(path)}


def _values(content: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Dotted path and value of everything, also of single entries of WHOLE fields."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _values(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", None if value == {} else value


def difference_rows(differences: Differences) -> list[tuple[str, str, str]]:
    """Field, value before and value now of each difference, for people."""
    return [(path, _shown(path, was), _shown(path, now)) for path, (was, now) in differences.items()]


def _shown(path: str, value: object) -> str:
    if path.startswith(MAY_HOLD_SECRETS):
        return "none" if value is None else "a value"
    return "none" if value is None else show(value)
