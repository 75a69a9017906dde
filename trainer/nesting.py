"""Nested JSON of others: a bound on its depth, and the objects in it.

From Python 3.12 on, the decoder takes 10,000 levels, and whatever then walks through them ends in a RecursionError.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_LEVELS = 100  # of objects and lists; the deepest that a run file, a job spec or a record has is below 20


def is_nested_too_deep(value: object, json_text: str | None = None) -> bool:
    """Return whether a value without cycles has more than MAX_LEVELS levels.

    json_text: what it was read from, where that is JSON; with few brackets, the value need not be walked.
    """
    if json_text is not None and json_text.count("{") + json_text.count("[") <= MAX_LEVELS:
        return False
    level = [value]
    for _ in range(MAX_LEVELS + 1):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def object_at(content: object, *keys: str) -> Mapping[str, object]:
    """Return the object below these keys of nested objects; empty where there is none."""
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content if isinstance(content, Mapping) else {}
