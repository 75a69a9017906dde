"""Chat templates: what each does to texts is found and written as it writes it, or refused in a sentence."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.support.trainer.chat_templates import TEMPLATES, with_template
from vlmpipe.trainer.data.chat.encode import IGNORED, Chat
from vlmpipe.trainer.data.chat.messages import Message, as_chat, shape_of, texts_of, tools_of
from vlmpipe.trainer.data.rejects import RejectedError

ONE = Message("user", (None, "What is this?"))
CAT = Message("assistant", ("A cat.",))
MORE = (Message("user", ("Is it old?",)), Message("assistant", ("No.",)))
SYSTEM = Message("system", ("Be brief.",))
THOUGHT = Message("assistant", ("A cat.",), "Whiskers.")
SAME = Message("assistant", ("same",))
TAGGED = Message("assistant", ("<think>a</think>b",))
BLANKS = Message("user", (" \n one ", None, " two \n\n"))
SHOWS = Message("assistant", ("Here: ", None, " and there."))
ENDS_IN_IMAGE = Message("assistant", ("Here: ", None))

LOOK = {"name": "look", "description": 'Shows a "place".', "parameters": {"properties": {"at": {"type": "string"}}}}
TOOLS = json.dumps([{"type": "function", "function": LOOK}])
CALL = json.dumps([{"type": "function", "function": {"name": "look", "arguments": {"at": "the \u00e9nd", "n": 2}}}])
WRITTEN = '<call>look {"at": "the \u00e9nd", "n": 2}</call><|end|>'
BARE = json.dumps([{"type": "function", "function": {"name": "look"}}])
ASKS = Message("user", (None, "Where?"), tools=TOOLS)
CALLS, SAYS_AND_CALLS = Message("assistant", (), calls=CALL), Message("assistant", ("One moment.",), calls=CALL)
RESULT = Message("tool", ("Paris",))

ALLOWED = [
    ("tools", (ASKS, CALLS, RESULT, CAT), [WRITTEN, "A cat.<|end|>"]),
    ("tools", (ASKS, SAYS_AND_CALLS, RESULT, RESULT, CALLS, RESULT, CAT),
     ["One moment." + WRITTEN, WRITTEN, "A cat.<|end|>"]),
    ("tools", (ASKS, CALLS, RESULT, CALLS, RESULT, CALLS), [WRITTEN] * 3),
    ("tools", (replace(ASKS, tools=BARE), CALLS, RESULT, CALLS), [WRITTEN] * 2),
    ("tools", (replace(SYSTEM, tools=TOOLS), ONE, CAT, *MORE), ["A cat.<|end|>", "No.<|end|>"]),
    ("calls in Python", (ASKS, CALLS), ["<call>look {'at': 'the \u00e9nd', 'n': 2}</call><|end|>"]),
    ("plain", (SYSTEM, ONE, CAT, *MORE), ["A cat.<|end|>", "No.<|end|>"]),
    ("plain", (ONE, SHOWS), ["Here: ", " and there.<|end|>"]),
    ("plain", (ONE, ENDS_IN_IMAGE), ["Here: ", "<|end|>"]),
    ("plain", (ONE, Message("assistant", (None, "This."))), ["This.<|end|>"]),
    ("plain", (ONE, ONE, CAT), ["A cat.<|end|>"]),
    ("plain", (ONE, SAME, Message("user", ("same",)), CAT), ["same<|end|>", "A cat.<|end|>"]),
    ("thinks", (ONE, THOUGHT), ["<think>Whiskers.</think>A cat.<|end|>"]),
    ("drops earlier thinking", (ONE, SAME, ONE, THOUGHT), ["same<|end|>", "<think>Whiskers.</think>A cat.<|end|>"]),
    ("strips", (BLANKS, Message("assistant", (" cat \n",))), ["cat<|end|>"]),
    ("strips line ends", (BLANKS, Message("assistant", ("\n cat \n",))), [" cat <|end|>"]),
    ("blank before answers", (ONE, CAT, *MORE), [" A cat.<|end|>", " No.<|end|>"]),
    ("images first", (BLANKS, CAT), ["A cat.<|end|>"]),
    ("dates", (SYSTEM, ONE, CAT), ["A cat.<|end|>"]),
    ("prompt thinks", (ONE, CAT), ["A cat.<|end|>"]),
    ("parts as code", (SYSTEM, ONE, CAT), ["A cat.<|end|>"]),
]  # fmt: skip
REFUSED = [
    ("plain", (ASKS, CAT), "leaves out the tool 'look'"),
    ("tools without calls", (ASKS, CALLS), "leaves out the call of 'look'"),
    ("tools without calls", (ASKS, SAYS_AND_CALLS, RESULT, CAT), "leaves out the call of 'look'"),
    ("calls without tools", (ASKS, CALLS), "leaves out the tool 'look'"),
    ("calls without tools", (replace(ASKS, tools=BARE), CALLS), "leaves out the tool 'look'"),
    ("calls by name", (ASKS, CALLS), "leaves out the call of 'look'"),
    ("calls without an end", (ASKS, CALLS), "writes no end token after the calls of answer 1"),
    ("calls without an end", (ASKS, SAYS_AND_CALLS), "writes no end token after the calls of answer 1"),
    ("prompt thinks, with tools", (ASKS, CALLS), "writes a call of a tool where no prompt leads to it"),
    ("drops earlier thinking", (ONE, THOUGHT, *MORE), "leaves out the thinking of answer 1, once another turn follows"),
    ("plain", (ONE, THOUGHT), "leaves out the thinking of answer 1"),
    ("no end token", (ONE, CAT), "writes no end token after the text of answer 1 .*data.answer_end"),
    ("no images in answers", (ONE, SHOWS), "writes 1 images of 2: those in answers"),
    ("alternates", (ONE, ONE, CAT), "roles must alternate"),
    ("dates", (ONE, CAT), "writes the date of the day here: give every conversation a system text"),
    ("repeats", (ONE, CAT), "repeats the text of question 1"),
    ("reorders", (BLANKS, CAT), "puts the text of question 1 before what comes first"),
    ("not Jinja", (ONE, CAT), "is no valid Jinja"),
    ("upper case", (ONE, CAT), "changes what these texts say"),
    (
        "moves tagged thinking",
        (ONE, Message("assistant", ("<think>a</think>b",))),
        "changes what .*'reasoning_content'",
    ),
]


def chat_of(template: str) -> Chat:
    return Chat(with_template(TEMPLATES[template]), as_text=False)


@pytest.mark.parametrize(("template", "messages", "answers"), ALLOWED)
def test_labels_are_answers_and_their_ends(template: str, messages: tuple[Message, ...], answers: list[str]) -> None:
    chat = chat_of(template)
    layout = chat.layout(shape_of(messages))
    tools = json.loads(tools_of(messages) or "null")
    rendered = chat.tokenizer.apply_chat_template(as_chat(messages, layout.strings), tools=tools, tokenize=False)
    assert layout.rendered(list(texts_of(messages))) == rendered
    images, labelled = chat.answers(messages)
    assert labelled == answers
    encoded = chat.encode_messages(messages, [3] * images)
    assert chat.tokenizer.decode([label for label in encoded.labels if label != IGNORED]) == "".join(answers)
    assert encoded.input_ids.count(chat.image_token_id) == 3 * images


@pytest.mark.parametrize(("template", "messages", "sentence"), REFUSED)
def test_what_a_template_does_not_allow_is_named(template: str, messages: tuple[Message, ...], sentence: str) -> None:
    chat = chat_of(template)
    with pytest.raises(RejectedError, match=f"the chat template .*{sentence}"):
        chat.verify(messages)


def test_serving_that_asks_otherwise_is_noticed() -> None:
    assert not chat_of("prompt thinks").layout(shape_of((ONE, CAT))).starts_at_prompt
    assert chat_of("blank before answers").layout(shape_of((ONE, CAT))).starts_at_prompt


def test_an_end_token_may_be_added_where_the_template_writes_none() -> None:
    chat = Chat(with_template(TEMPLATES["no end token"]), added_end="<|end|>", as_text=False)
    messages = (ONE, CAT, *MORE)
    chat.verify(messages)
    assert chat.answers(messages)[1] == ["A cat.<|end|>", "No.<|end|>"]
    text = chat.tokenizer.decode(chat.encode_messages(messages, [1]).input_ids)
    assert "A cat.<|end|><|turn|>user" in text
