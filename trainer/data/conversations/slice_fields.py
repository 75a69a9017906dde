"""Fields of records that `data.slices` names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from vlmpipe.trainer.data.conversations.message_parts import text


def fields_named(record: Mapping[str, object], names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The record's fields that `data.slices` names, with their values as text; without those that have none.

    A list or an object is no value: `evaluate` counts its questions as without one.
    """
    values = ((name, record.get(name)) for name in names)
    return tuple((name, shown) for name, value in values if (shown := _shown(name, value)))


def _shown(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(int(value) if value.is_integer() else value) if math.isfinite(value) else ""  # all of its digits
    return text(str(value), name).strip() if isinstance(value, str | int) else ""
