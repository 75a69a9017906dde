"""Turns as messages: where images and line ends go."""

from __future__ import annotations

import pytest

from vlmpipe.trainer.data.chat.messages import Message, filled, messages_of, shape_of, texts_of
from vlmpipe.trainer.data.sample import Turn


@pytest.mark.parametrize(
    ("question", "content"),
    [
        ("What?", ("What?",)),
        ("<image>\nWhat?", (None, "What?")),
        ("What?\n<image>", ("What?", None)),
        ("<image>\n<image>\nSame?", (None, None, "Same?")),
        ("from <image> to <image>?", ("from ", None, " to ", None, "?")),
        ("one\n\n<image>\n\ntwo", ("one\n", None, "\ntwo")),
    ],
)
def test_a_mark_and_the_line_end_beside_it_become_an_image(question: str, content: tuple[str | None, ...]) -> None:
    assert messages_of([Turn(question, "")]) == [Message("user", content)]


def test_system_texts_and_thinking_are_messages_own() -> None:
    turns = [Turn("<image>\na", "b <image>", system="s", thinking="t"), Turn("c", "d")]
    messages = messages_of(turns)
    assert messages == [
        Message("system", ("s",)),
        Message("user", (None, "a")),
        Message("assistant", ("b ", None), "t"),
        Message("user", ("c",)),
        Message("assistant", ("d",)),
    ]
    assert filled(shape_of(messages), texts_of(messages)) == messages
    assert [one.content for one in messages_of(turns, "<p>")][1:3] == [("<p>\na",), ("b <p>",)]
