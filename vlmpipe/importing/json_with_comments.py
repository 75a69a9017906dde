"""JSON as guides print it: with // and /* */ comments, and commas after the last value."""

from __future__ import annotations

import re

_PARTS = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_LAST_COMMA = re.compile(r'"(?:[^"\\\n]|\\.)*"|,(?=\s*[}\]])')


def without_comments(text: str) -> str:
    """Plain JSON, with a space in place of each comment. Texts with // in them, such as addresses, stay."""
    plain = _PARTS.sub(lambda part: part[0] if part[0].startswith('"') else " ", text)
    return _LAST_COMMA.sub(lambda part: part[0] if part[0].startswith('"') else "", plain)
