"""Proof that a chat template gives tokens and labels: nine kinds of conversation, tried before any data is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from vlmpipe.trainer.data.chat.encode import IGNORED, Chat
from vlmpipe.trainer.data.chat.layout import refused as _refused
from vlmpipe.trainer.data.chat.messages import Message, Part, Role, shape_of
from vlmpipe.trainer.data.rejects import RejectedError
from vlmpipe.trainer.errors import ConfigError

IMAGE: Part = None
ASKED, SYSTEM = "one question about an image", "a system text"


def _chat(*messages: tuple[Role, tuple[Part, ...]], thinking: str = "") -> tuple[Message, ...]:
    return tuple(Message(role, content, thinking if role == "assistant" else "") for role, content in messages)


ONE: tuple[Role, tuple[Part, ...]] = ("user", (IMAGE, "What is this?"))
CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    ASKED: _chat(ONE, ("assistant", ("A cat.",))),
    "several turns": _chat(ONE, ("assistant", ("A cat.",)), ("user", ("Is it old?",)), ("assistant", ("No.",))),
    SYSTEM: _chat(("system", ("Be brief.",)), ONE, ("assistant", ("A cat.",))),
    "text without an image": _chat(("user", ("Why?",)), ("assistant", ("Who knows.",))),
    "images between texts": _chat(("user", ("From", IMAGE, "to", IMAGE, "?")), ("assistant", ("It grew.",))),
    "images in answers": _chat(("user", ("Show it.",)), ("assistant", ("Here:", IMAGE, "and there."))),
    "thinking": _chat(ONE, ("assistant", ("A cat.",)), thinking="It has whiskers."),
    "thinking in earlier turns": _chat(
        ONE, ("assistant", ("A cat.",)), ("user", ("Is it old?",)), ("assistant", ("No.",)), thinking="Whiskers."
    ),
    "two questions in a row": _chat(ONE, ("user", ("Is it old?",)), ("assistant", ("No.",))),
}


@dataclass(frozen=True)
class Proof:
    """Abilities of a chat template. `refused`: kinds of conversation and why not."""

    refused: dict[str, str]
    starts_at_prompt: bool  # every answer's labels start where the prompt of its turn ends

    def described(self) -> str:
        """One sentence for people."""
        lacking = "; ".join(f"not {kind} ({why})" for kind, why in self.refused.items())
        allowed = len(CONVERSATIONS) - len(self.refused)
        text = f"{allowed} of {len(CONVERSATIONS)} kinds of conversation" + (f"; {lacking}" if lacking else "")
        if not self.starts_at_prompt:
            text += "; some prompts when serving are not how training continues, so labels start at the answer"
        return text


def prove(chat: Chat) -> Proof:
    """Try every kind of conversation."""
    refused, at_prompt = {}, True
    for kind, messages in CONVERSATIONS.items():
        if chat.as_text:
            messages = tuple(_as_text(message, chat.placeholder) for message in messages)
        try:
            require_labels(chat, messages)
            at_prompt &= chat.layout(shape_of(messages)).starts_at_prompt
        except RejectedError as error:
            refused[kind] = str(error)
    return Proof(refused, at_prompt)


def require_answers(make: Callable[[bool], Chat], name: str, forms: Sequence[bool] = (False, True)) -> Chat:
    """The first chat of `make` that writes one question about an image and its answer, or one after a system text.

    Raises ConfigError where there is none.

    Args:
        make: given whether images are marks in texts (`Chat.as_text`) and not parts of their own.
        forms: what to give it.
    """
    problems = []
    for as_text in forms:
        chat = make(as_text)
        refused = prove(chat).refused
        if not {ASKED, SYSTEM} <= refused.keys():  # some templates need a system text
            return chat
        problems.append(f"{refused[ASKED]} ({'images as text' if as_text else 'images as parts'})")
    raise ConfigError(
        f"data.chat_template {name}: " + "; ".join(problems),
        expected=f"a template that writes {ASKED} and its answer",
        fix="set data.chat_template to a file with such a template, or to vlmpipe",
    )


def _as_text(message: Message, placeholder: str) -> Message:
    content = "".join(f"{placeholder}\n" if part is None else part for part in message.content)
    return replace(message, content=(content,))


def require_labels(chat: Chat, messages: tuple[Message, ...]) -> None:
    """Raise RejectedError unless the labels, decoded, are the answers with their end tokens and nothing else."""
    chat.verify(messages)
    images, answers = chat.answers(messages)
    encoded = chat.encode_messages(messages, [1] * images)
    runs = [list(run) for is_label, run in groupby(encoded.labels, lambda label: label != IGNORED) if is_label]
    assert not any(chat.image_token_id in run for run in runs)
    texts = [chat.tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]
    # Some tokenizers decode without the blank that a text begins with; none may decode to more than the answer.
    equal = [a.lstrip(" ") == b.lstrip(" ") and len(a) <= len(b) for a, b in zip(texts, answers, strict=False)]
    if len(texts) != len(answers) or not all(equal):
        raise _refused(f"and this tokenizer label {texts} where {answers} is answered")
