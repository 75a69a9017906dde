"""Conversations as messages of a role and parts, the form that chat templates take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.sample import Turn

BESIDE_MARK = re.compile(rf"\n?{re.escape(IMAGE_TOKEN)}\n?")
Role = Literal["system", "user", "assistant"]
Part = str | None  # None: an image
# Per message its role, whether it has thinking, and which of its parts are texts.
Shape = tuple[tuple[Role, bool, tuple[bool, ...]], ...]


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: tuple[Part, ...]
    thinking: str = ""  # of an answer: the template's `reasoning_content`
    is_context: bool = False  # an answer that is no label


def messages_of(turns: Iterable[Turn], image_text: str | None = None) -> list[Message]:
    """The conversation of these turns.

    image_text: contents become one text each, with this in place of each `<image>`; None: `<image>` becomes a part.
    """
    messages: list[Message] = []
    for turn in turns:
        if turn.system:
            messages.append(Message("system", (turn.system,)))
        messages.append(Message("user", _content(turn.question, image_text)))
        if turn.answer:
            content = _content(turn.answer, image_text)
            messages.append(Message("assistant", content, turn.thinking, turn.is_context))
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
    return tuple((one.role, bool(one.thinking), tuple(part is not None for part in one.content)) for one in messages)


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
        )
        for role, has_thinking, parts in shape
    ]


def described(shape: Shape) -> list[str]:
    """What each of `texts_of` is, for people: "the text of answer 2"."""
    names, counts = [], {"system": 0, "user": 0, "assistant": 0}
    for role, has_thinking, parts in shape:
        counts[role] += 1
        if role == "system":
            where = "the system message"
        else:
            where = f"{'question' if role == 'user' else 'answer'} {counts[role]}"
        names += [f"the thinking of {where}"] * has_thinking + [f"the text of {where}"] * sum(parts)
    return names


def as_chat(messages: Sequence[Message], plain: frozenset[Role] = frozenset()) -> list[dict[str, Any]]:
    """The messages as `apply_chat_template` takes them. plain: roles whose text-only contents are given as strings."""
    chat = []
    for message in messages:
        parts = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in message.content]
        content: Any = parts
        if message.role in plain and len(parts) == 1 and message.content[0] is not None:
            content = message.content[0]
        thinking = {"reasoning_content": message.thinking} if message.thinking else {}
        chat.append({"role": message.role, "content": content, **thinking})
    return chat
