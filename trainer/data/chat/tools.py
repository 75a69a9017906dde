"""Check whether a rendering has a conversation's tools and calls, which many templates leave out without a word."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from vlmpipe.trainer.data.chat.messages import Shape


def lacking_tools(shape: Shape, pieces: Sequence[str]) -> str:
    """The first call or tool that a rendering lacks, for people; "" where it has all.

    Looks for the name, the description and the names of parameters of each tool, and the name and all arguments of each
    call. The names in calls are not those of tools.

    Args:
        pieces: the literal text before each text of the conversation, and after the last.
    """
    called, slot = Counter[str](), 0
    for message in shape:
        slot += message.num_texts
        for call in json.loads(message.calls) if message.calls else ():
            function = call["function"]
            called[function["name"]] += 1
            if any(not _is_in(word, pieces[slot]) for word in (function["name"], *_leaves(function["arguments"]))):
                return f"the call of {function['name']!r}"
    written = "".join(pieces)
    for tool in (tool for message in shape if message.tools for tool in json.loads(message.tools)):
        function = tool["function"]
        parameters = function.get("parameters") or {}
        words = [function.get("description") or "", *(parameters.get("properties") or {})]
        is_named = sum(map(written.count, _spellings(function["name"]))) > called[function["name"]]
        if not is_named or any(not _is_in(word, written) for word in words):
            return f"the tool {function['name']!r}"
    return ""


def _leaves(value: object) -> Iterator[object]:
    """Keys and values of arguments, but for true, false and null, which each template spells in its own way."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value is not None and not isinstance(value, bool):
        yield value


def _is_in(value: object, text: str) -> bool:
    """Return whether a text has the value, as JSON or as it is."""
    if not isinstance(value, str):
        return json.dumps(value) in text or str(value) in text
    return any(spelling in text for spelling in _spellings(value))


def _spellings(text: str) -> set[str]:
    """A text as it is and as JSON."""
    return {text, *(json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))}
