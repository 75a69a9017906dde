"""Tools of a conversation, calls of them and their results, as OpenAI, ms-swift and LLaMA-Factory write them.

Sources: https://platform.openai.com/docs/guides/supervised-fine-tuning (tools, tool_calls),
https://swift.readthedocs.io/en/latest/Instruction/Agent-support.html (tool_call, tool_response),
https://llamafactory.readthedocs.io/en/latest/getting_started/data_preparation.html (function_call, observation).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from vlmpipe.trainer.data.conversations.message_parts import kind_of, text
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.text_files.json_stream import BadJsonError, parse_json

TOOLS, TOOL_CALLS = "tools", "tool_calls"
CALL_ROLES = ("tool_call", "function_call")  # messages whose content is a call
RESULT_ROLES = ("tool", "tool_response", "observation")
MAX_DEPTH = 64  # of nested objects and lists
TOOL_KEYS = frozenset({TOOL_CALLS, "tool_call_id"})  # of messages


def tools_json(value: object) -> str:
    """A record's tools as templates take them: a JSON list of {type, function}; "" for none. Raises RejectedError."""
    tools = [_tool(tool, f"tools {number}") for number, tool in enumerate(_listed(value, TOOLS), 1)]
    return _json(tools) if tools else ""


def calls_in(message: Mapping[str, object], place: str) -> list[dict[str, object]]:
    """The calls under `tool_calls` of an answer, as templates take them. Raises RejectedError."""
    calls = _listed(message.get(TOOL_CALLS), f"{place}.{TOOL_CALLS}")
    return [_call(call, f"{place}.{TOOL_CALLS} {number}") for number, call in enumerate(calls, 1)]


def calls_of_text(content: str, place: str) -> list[dict[str, object]]:
    """The calls that a message of CALL_ROLES consists of: one or a list. Raises RejectedError."""
    value = _parsed(content, place)
    return [_call(call, place) for call in (value if isinstance(value, list) else [value])]


def require_prepared(tools: str, calls: str, place: str) -> None:
    """Raise RejectedError unless these are tools and calls as `tools_json` and `calls_json` write them."""
    for tool in _listed(tools, f"{place}.tools"):
        _tool({"function": _object(tool, place).get("function")}, f"{place}.tools")
    for call in _listed(calls, f"{place}.calls"):
        function = _object(_object(call, place).get("function"), f"{place}.calls")
        _object(function.get("arguments"), f"{place}.calls.arguments")
        _call(call, f"{place}.calls")


def calls_json(calls: Sequence[dict[str, object]]) -> str:
    return _json(calls) if calls else ""


def _tool(tool: object, place: str) -> dict[str, object]:
    function = _object(_object(tool, place).get("function", tool), place)
    if not isinstance(function.get("name"), str):
        raise _refused(f"{place} has no 'name'")
    parameters = function.get("parameters")
    if parameters is not None:
        properties = _object(parameters, f"{place}.parameters").get("properties")
        if properties is not None:
            _object(properties, f"{place}.parameters.properties")
    return {"type": "function", "function": _without_nulls(function)}


def _call(call: object, place: str) -> dict[str, object]:
    holder = _object(call, place)
    function = _object(holder.get("function", holder), place)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{place}.arguments") if arguments.strip() else {}
        _without_nulls(arguments)  # bounds their depth
    else:
        arguments = _without_nulls(arguments or {})
    if not isinstance(function.get("name"), str):
        raise _refused(f"{place} has no 'name'")
    if not isinstance(arguments, dict):
        raise _refused(f"{place}.arguments is {kind_of(arguments)}, not an object")
    named = {"id": text(holder["id"], f"{place}.id")} if holder.get("id") is not None else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _without_nulls(value: object, depth: int = MAX_DEPTH) -> object:
    """Remove keys whose value is null: columns give each object all keys of all objects."""
    if not depth:
        raise _refused(f"tools or calls are nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {key: _without_nulls(item, depth - 1) for key, item in value.items() if item is not None}
    return [_without_nulls(item, depth - 1) for item in value] if isinstance(value, list) else value


def _listed(value: object, place: str) -> list[object]:
    if value is None or value == "":
        return []
    tools = _parsed(value, place) if isinstance(value, str) else value
    if not isinstance(tools, list):
        raise _refused(f"{place!r} is {kind_of(tools)}, not a list")
    return tools


def _parsed(value: str, place: str) -> object:
    try:
        return parse_json(value)
    except BadJsonError as error:
        raise RejectedError(RejectCode.RECORD_PARSE, f"{place!r} is not JSON: {error}") from error


def _object(value: object, place: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _refused(f"{place} is {kind_of(value)}, not an object")
    return value


def _json(value: object) -> str:
    """Return the value as JSON of whole characters, as texts of a sample are. Raises RejectedError."""
    try:
        return text(json.dumps(value, ensure_ascii=False), "tools or calls")
    except RecursionError as error:
        raise _refused(f"tools or calls are nested deeper than {MAX_DEPTH} levels") from error


def _refused(message: str) -> RejectedError:
    return RejectedError(RejectCode.RECORD_FORM, message)
