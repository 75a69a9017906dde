"""Tools, calls of them and their results are read alike from each layout, or refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.records import SHAPES, turns_of
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import Turn

LOOK = {"name": "look", "description": "Shows a place."}
TOOLS = [{"type": "function", "function": LOOK}]
CALL = {"name": "look", "arguments": {"at": "the end"}}
ASKED, ANSWERED = {"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In Paris."}
OPENAI = {
    "tools": TOOLS,
    "messages": [
        ASKED,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": CALL | {"arguments": json.dumps(CALL["arguments"])}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Paris"},
        ANSWERED,
    ],
}
SWIFT = {
    "tools": json.dumps(TOOLS),
    "messages": [
        ASKED,
        {"role": "tool_call", "content": json.dumps(CALL)},
        {"role": "tool_response", "content": "Paris"},
        ANSWERED,
    ],
}
LLAMA_FACTORY = {
    "tools": json.dumps([LOOK]),
    "conversations": [
        {"from": "human", "value": "Where?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "Paris"},
        {"from": "gpt", "value": "In Paris."},
    ],
}
# As Parquet gives structs: each key that another row has, too, with null.
COLUMNS: dict[str, Any] = {
    "tools": [{"type": "function", "function": LOOK | {"parameters": None}}],
    "messages": [
        ASKED | {"tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": None, "function": {"name": "look", "arguments": {"at": "the end", "of": None}}}]},
        {"role": "tool", "content": "Paris", "tool_calls": None},
        ANSWERED | {"tool_calls": None},
    ],
}  # fmt: skip
TRL = {
    "tools": OPENAI["tools"],
    "prompt": OPENAI["messages"][:1],
    "completion": OPENAI["messages"][1:],
}
EXPECTED = [
    Turn("Where?", "", tools=json.dumps(TOOLS), calls=json.dumps([{"type": "function", "function": CALL}])),
    Turn("", "In Paris.", results=("Paris",)),
]


def turns(record: Record) -> list[Turn]:
    return list(turns_of(record, 0, "", tuple(SHAPES)))


@pytest.mark.parametrize("layout", [OPENAI, SWIFT, LLAMA_FACTORY, COLUMNS, TRL])
def test_layouts_give_equal_turns_and_leave_nothing_unread(layout: dict[str, Any]) -> None:
    record = Record(layout)
    assert turns(record) == EXPECTED and record.unread(has_media=False) == ()


def test_calls_and_results_in_a_row_are_of_one_turn() -> None:
    call, result = SWIFT["messages"][1:3]
    (first, second) = turns(Record({"messages": [ASKED, call, call, result, result, ANSWERED]}))
    assert len(json.loads(first.calls)) == 2 and second.results == ("Paris", "Paris")
    (spoken, _) = turns(Record({"messages": [ASKED, ANSWERED, call, result, ANSWERED]}))
    assert (spoken.answer, json.loads(spoken.calls)[0]["function"]) == ("In Paris.", CALL)


def test_prepared_turns_are_read_back() -> None:
    stored = json.loads(json.dumps([asdict(turn) for turn in EXPECTED]))
    for turn in stored:
        del turn["region"]
    record = Record({"turns": stored})
    assert turns(record) == EXPECTED and record.unread(has_media=False) == ()


def test_turns_that_differ_in_calls_are_different_samples() -> None:
    first = EXPECTED[0]
    others = [Turn("Where?", ""), Turn("Where?", "", tools=first.tools), Turn("Where?", "", calls=first.calls)]
    swapped = Turn("Where?", "", tools=first.calls, calls=first.tools)
    assert len({turn.identity() for turn in (first, swapped, *others)}) == 5


def calling(calls: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "tool_calls": calls}]}


def prepared(**more: Any) -> dict[str, Any]:
    return {"turns": [{"question": "Where?", "answer": "Here.", **more}]}


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


REFUSED: dict[str, tuple[dict[str, Any], RejectCode, str]] = {
    "no list": (calling({"name": "x"}), RejectCode.RECORD_FORM, r"'messages 2.tool_calls' is an object, not a list"),
    "no name": (calling([{"function": {"arguments": {}}}]), RejectCode.RECORD_FORM, "tool_calls 1 has no 'name'"),
    "arguments of a list": (calling([{"name": "x", "arguments": [1]}]), RejectCode.RECORD_FORM, "is a list, not an ob"),
    "arguments that are cut": (calling([{"name": "x", "arguments": '{"a'}]), RejectCode.RECORD_PARSE, "is not JSON"),
    "nested": (calling([{"name": "x", "arguments": deep(80)}]), RejectCode.RECORD_FORM, "deeper than 64 levels"),
    "a text of nested": (
        calling([{"name": "x", "arguments": json.dumps(deep(80))}]), RejectCode.RECORD_FORM, "deeper than 64 levels",
    ),
    "half a character": (calling([{"name": "x", "arguments": {"a": "\ud800"}}]), RejectCode.RECORD_ENCODING, "whole"),
    "tools of texts": ({"messages": [ASKED, ANSWERED], "tools": ["look"]}, RejectCode.RECORD_FORM, "tools 1 is a text"),
    "a question that calls": (
        {"messages": [ASKED | {"tool_calls": [CALL]}, ANSWERED]}, RejectCode.CONV_ROLES, "'tool_calls' and the role",
    ),
    "a result first": ({"messages": [SWIFT["messages"][2], ANSWERED]}, RejectCode.CONV_ROLES, "without a call before"),
    "a result of no call": (
        {"messages": [ASKED, ANSWERED, SWIFT["messages"][2], ANSWERED]}, RejectCode.CONV_ROLES, "without a call before",
    ),
    "parameters of a text": (
        {"messages": [ASKED, ANSWERED], "tools": [LOOK | {"parameters": "at"}]}, RejectCode.RECORD_FORM, "is a text",
    ),
    "parameters of a list": (
        {"messages": [ASKED, ANSWERED], "tools": [LOOK | {"parameters": {"properties": ["at"]}}]},
        RejectCode.RECORD_FORM, "properties is a list, not an object",
    ),
    "prepared calls of a text": (prepared(calls="look"), RejectCode.RECORD_PARSE, "'turns 1.calls' is not JSON"),
    "prepared calls of a number": (prepared(calls="[1]"), RejectCode.RECORD_FORM, "is a number, not an object"),
    "prepared calls without arguments": (
        prepared(calls='[{"function": {"name": "look"}}]'), RejectCode.RECORD_FORM, "arguments is nothing",
    ),
    "prepared tools of an object": (prepared(tools="{}"), RejectCode.RECORD_FORM, "is an object, not a list"),
    "prepared results of no call": (prepared(question="", results=["x"]), RejectCode.RECORD_FORM, "no call before"),
    "prepared results of a question": (prepared(results=["x"]), RejectCode.RECORD_FORM, "a question next to them"),
    "a result last": ({"messages": SWIFT["messages"][:3]}, RejectCode.CONV_ROLES, "not human and gpt in turn"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_call_or_result_is_refused_in_words(name: str) -> None:
    content, code, words = REFUSED[name]
    with pytest.raises(RejectedError, match=words) as rejected:
        turns(Record(content))
    assert rejected.value.code == code


def test_tools_of_shapes_that_cannot_call_them_are_refused() -> None:
    record = Record({"question": "Where?", "answer": "Paris", "tools": TOOLS})
    turns(record)
    with pytest.raises(RejectedError, match="'tools', which changes what is learned"):
        record.unread(has_media=False)
