"""Conversations as messages of a role and parts, the form that chat templates take."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.sample import Turn

BESIDE_MARK = re.compile(rf"\n?{re.escape(IMAGE_TOKEN)}\n?")
Role = Literal["system", "user", "assistant", "tool"]
Part = str | None  # None: an image


class MessageShape(NamedTuple):
    """All that decides how a template writes a message, but its texts."""

    role: Role
    has_thinking: bool
    are_texts: tuple[bool, ...]  # which of its parts are
    calls: str = ""
    tools: str = ""

    @property
    def num_texts(self) -> int:
        """The number of its texts, its thinking included."""
        return self.has_thinking + sum(self.are_texts)


Shape = tuple[MessageShape, ...]
NAMES: dict[Role, str] = {
    "system": "the system message", "user": "question", "assistant": "answer", "tool": "the result of call",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: tuple[Part, ...]
    thinking: str = ""  # of an answer: the template's `reasoning_content`
    is_context: bool = False  # an answer that is no label
    calls: str = ""  # of tools, in an answer: the JSON of the template's `tool_calls`
    tools: str = ""  # of the conversation, in its first message: the JSON of the template's `tools`


def messages_of(turns: Iterable[Turn], image_text: str | None = None) -> list[Message]:
    """The conversation of these turns.

    image_text: contents become one text each, with this in place of each `<image>`; None: `<image>` becomes a part.
    """
    messages: list[Message] = []
    for turn in turns:
        if turn.system:
            messages.append(Message("system", (turn.system,)))
        messages += [Message("tool", (result,)) for result in turn.results]
        if not turn.results:
            messages.append(Message("user", _content(turn.question, image_text)))
        if turn.answer or turn.calls:
            content = _content(turn.answer, image_text) if turn.answer else ()
            messages.append(Message("assistant", content, turn.thinking, turn.is_context, turn.calls))
        if turn.tools:
            messages[0] = replace(messages[0], tools=turn.tools)
    return messages


def _content(text: str, image_text: str | None) -> tuple[Part, ...]:
    if image_text is not None:
        return (text.replace(IMAGE_TOKEN, image_text),)
    return content_parts(text)


def content_parts(text: str) -> tuple[Part, ...]:
    """Texts, and None for each `<image>` between them."""
    if IMAGE_TOKEN not in text:
        return (text,)
    parts: list[Part] = []
    for number, between in enumerate(BESIDE_MARK.split(text)):  # a line end beside a mark belongs to the mark
        parts += [None, between] if number else [between]
    return tuple(part for part in parts if part != "")


def shape_of(messages: Iterable[Message]) -> Shape:
    return tuple(
        MessageShape(
            message.role,
            bool(message.thinking),
            tuple(part is not None for part in message.content),
            message.calls,
            message.tools,
        )
        for message in messages
    )


def texts_of(messages: Iterable[Message]) -> Iterator[str]:
    """All texts, in the order in which templates write them: an answer's thinking first."""
    for message in messages:
        if message.thinking:
            yield message.thinking
        yield from (part for part in message.content if part is not None)


def context_answers(messages: Iterable[Message]) -> frozenset[int]:
    """The numbers, from 0, of answers that are no labels."""
    answers = (message for message in messages if message.role == "assistant")
    return frozenset(number for number, answer in enumerate(answers) if answer.is_context)


def images_in(messages: Iterable[Message]) -> int:
    return sum(part is None for message in messages for part in message.content)


def filled(shape: Shape, texts: Iterable[str]) -> list[Message]:
    """Messages of this shape with these texts."""
    left = iter(texts)
    return [
        Message(
            role,
            thinking=next(left) if has_thinking else "",
            content=tuple(next(left) if is_text else None for is_text in parts),
            calls=calls,
            tools=tools,
        )
        for role, has_thinking, parts, calls, tools in shape
    ]


def described(shape: Shape) -> list[str]:
    """Name each of `texts_of` for people: "the text of answer 2"."""
    names, counts = [], dict.fromkeys(NAMES, 0)
    for message in shape:
        counts[message.role] += 1
        where = NAMES[message.role] + (f" {counts[message.role]}" if message.role != "system" else "")
        names += [f"the thinking of {where}"] * message.has_thinking
        names += [f"the text of {where}"] * sum(message.are_texts)
    return names


def as_chat(messages: Sequence[Message], plain: frozenset[Role] = frozenset()) -> list[dict[str, object]]:
    """The messages as `apply_chat_template` takes them. plain: roles whose text-only contents are given as strings.

    Results of tools, and answers that only call tools, always are: some templates print other contents as Python does.
    """
    chat = []
    for message in messages:
        parts = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in message.content]
        content: object = parts
        is_plain = message.role in plain or message.role == "tool"
        if is_plain and len(parts) == 1 and message.content[0] is not None:
            content = message.content[0]
        if message.calls and not parts:
            content = ""
        thinking = {"reasoning_content": message.thinking} if message.thinking else {}
        calls = {"tool_calls": json.loads(message.calls)} if message.calls else {}
        chat.append({"role": message.role, "content": content, **thinking, **calls})
    return chat


def tools_of(messages: Sequence[Message]) -> str:
    """The conversation's tools, as JSON; empty where it has none."""
    return messages[0].tools if messages else ""
