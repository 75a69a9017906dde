"""Record shapes that data sets use for a conversation, and a record's id, slice and split."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from trainer.config.data import BY_IMAGE, BY_RECORD
from trainer.config.model import IMAGE_TOKEN
from trainer.data.rejects import RejectCode, RejectedError
from trainer.data.sample import DEFAULT_SLICE, Split, Turn

VIDEO_MARK = "<video>"
QUESTION_ROLES = ("human", "user")
ANSWER_ROLES = ("gpt", "assistant")
THINKING = ("thinking", "reasoning_content")  # of an answer
MARKS = {"image": IMAGE_TOKEN, "image_url": IMAGE_TOKEN, "video": VIDEO_MARK, "video_url": VIDEO_MARK}  # of typed parts


def turns_of(
    record: Mapping[str, Any], num_images: int, caption_question: str, keys: Sequence[str]
) -> tuple[Turn, ...]:
    """The record's conversation, by the first of `keys` that it has.

    Shapes without `<image>` marks (question and answer, caption, the Cauldron's `texts`) get one for each image before
    the first question. Raises RejectedError.
    """
    key = next((key for key in keys if record.get(key) is not None), None)
    if key is None:
        raise RejectedError(RejectCode.RECORD_FORM, f"nothing under {' or '.join(map(repr, keys))}")
    turns = SHAPES[key](record[key], record, caption_question)
    if key in UNMARKED and turns and not any(IMAGE_TOKEN in turn.question for turn in turns):
        turns[0] = replace(turns[0], question=f"{IMAGE_TOKEN}\n" * num_images + turns[0].question)
    names = _slices(record, key, len(turns))
    if turns and (rejected := record.get("rejected")) is not None:
        turns[-1] = replace(turns[-1], rejected=_last_answer(rejected))
    return tuple(
        replace(
            turn,
            question=turn.question.strip(),
            answer=turn.answer.strip(),
            slice=name,
            system=turn.system.strip(),
            thinking=turn.thinking.strip(),
            rejected=turn.rejected.strip(),
        )
        for turn, name in zip(turns, names, strict=True)
    )


def with_frames(turns: Sequence[Turn], frames: Sequence[int]) -> tuple[Turn, ...]:
    """The turns with an image mark for each frame in place of the k-th video mark; before the first question where a
    single video has no mark. Raises RejectedError where marks and videos differ in number.
    """
    marks = sum(text.count(VIDEO_MARK) for turn in turns for text in turn.texts())
    if not marks and len(frames) == 1 and turns:
        turns, marks = [replace(turns[0], question=f"{VIDEO_MARK}\n{turns[0].question}"), *turns[1:]], 1
    if marks != len(frames):
        raise RejectedError(RejectCode.CONV_IMAGE_COUNT, f"{marks} {VIDEO_MARK} marks for {len(frames)} videos")
    left = iter(frames)

    def filled(words: str) -> str:
        return re.sub(VIDEO_MARK, lambda _: IMAGE_TOKEN * next(left), words)

    return tuple(replace(turn, question=filled(turn.question), answer=filled(turn.answer)) for turn in turns)


def identity_of(record: Mapping[str, Any], default: str = "") -> str:
    """The record's id as text; `default` where it has none."""
    identity = record.get("id")
    if identity is None:
        return default
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise RejectedError(RejectCode.RECORD_FORM, f"'id' must be a text or a whole number, not {identity!r}")
    return str(identity)


def split_named(record: Mapping[str, Any]) -> Split | None:
    """The split that the record names, if any."""
    split = record.get("split")
    if split is not None and split not in get_args(Split):
        raise RejectedError(RejectCode.RECORD_FORM, f"'split' must be train or eval, not {split!r}")
    return split


def group_named(record: Mapping[str, Any], split_by: str) -> str:
    """The record's value of the field that `data.split_by` names; empty where it names none."""
    if split_by in (BY_IMAGE, BY_RECORD):
        return ""
    value = record.get(split_by)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RejectedError(RejectCode.RECORD_FORM, f"{split_by!r} must be a text or a whole number, not {value!r}")
    return text(str(value))


def text(value: Any) -> str:
    """The value, if it is a text without lone surrogates, which JSON can spell and no tokenizer accepts."""
    if not isinstance(value, str):
        raise RejectedError(RejectCode.RECORD_FORM, f"a {type(value).__name__} where a text should be")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RejectedError(RejectCode.RECORD_ENCODING, f"a text that is not whole characters: {error}") from error
    return value


def _slices(record: Mapping[str, Any], key: str, turns: int) -> list[str]:
    own = [turn.get("slice") for turn in record[key]] if key == "turns" else [None] * turns
    names = [record.get("slice", DEFAULT_SLICE) if name is None else name for name in own]
    names = [DEFAULT_SLICE if name is None else name for name in names]
    if not all(isinstance(name, str) and name for name in names):
        raise RejectedError(RejectCode.RECORD_FORM, f"'slice' must be a name, not {record.get('slice')!r}")
    return [text(name) for name in names]


def _alternating(messages: Any, role_key: str, text_key: str) -> list[Turn]:
    """Alternating questions and answers, perhaps after a system message."""
    roles, texts, thinking = [], [], []
    for message in _objects(messages):
        roles.append(message.get(role_key))
        texts.append(_content(message.get(text_key)))
        thinking.append(text(next((message[key] for key in THINKING if message.get(key) is not None), "")))
    system = ""
    if roles and roles[0] == "system":
        system, *texts = texts
        del roles[0], thinking[0]
    asked, answered = roles[::2], roles[1::2]
    known = all(role in QUESTION_ROLES for role in asked) and all(role in ANSWER_ROLES for role in answered)
    if len(asked) != len(answered) or not known:
        raise RejectedError(RejectCode.CONV_ROLES, f"roles are {roles[:6]}, not human and gpt in turn")
    thoughts = zip(texts[::2], texts[1::2], thinking[1::2], strict=True)
    turns = [Turn(question, answer, thinking=thought) for question, answer, thought in thoughts]
    return [replace(turns[0], system=system), *turns[1:]] if turns else []


def _content(content: Any) -> str:
    """A text, or Hugging Face's list of parts {"type": "text", "text": ...} and {"type": "image"}."""
    if not isinstance(content, list):
        return text(content)
    parts = (
        f"{MARKS[part['type']]}\n" if part.get("type") in MARKS else text(part.get("text"))
        for part in _objects(content)
    )
    return "".join(parts)


def _chosen(chosen: Any, record: Mapping[str, Any]) -> list[Turn]:
    """A conversation whose last answer is preferred, perhaps with what comes before it under `prompt`."""
    before = record.get("prompt")
    return _alternating([*([] if before is None else _objects(before)), *_objects(chosen)], "role", "content")


def _last_answer(rejected: Any) -> str:
    """The rejected answer: a text, or messages that end with it."""
    if isinstance(rejected, str):
        return text(rejected)
    messages = _objects(rejected)
    return _content(messages[-1].get("content")) if messages else ""


def _pairs(turns: Any, question: str, answer: str) -> list[Turn]:
    return [Turn(text(turn.get(question)), text(turn.get(answer))) for turn in _objects(turns)]


def _objects(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RejectedError(RejectCode.RECORD_FORM, "a conversation must be a list of objects")
    return value


# Key of a conversation -> its texts, from the value, the record and data.caption_question.
SHAPES: dict[str, Callable[[Any, Mapping[str, Any], str], list[Turn]]] = {
    "conversations": lambda messages, *_: _alternating(messages, "from", "value"),
    "messages": lambda messages, *_: _alternating(messages, "role", "content"),
    "chosen": lambda messages, record, _: _chosen(messages, record),
    "texts": lambda turns, *_: _pairs(turns, "user", "assistant"),
    "turns": lambda turns, *_: _pairs(turns, "question", "answer"),
    "question": lambda question, record, _: [Turn(text(question), text(record.get("answer")))],
    "caption": lambda caption, _, asked: [Turn(asked, text(caption))],
    "text": lambda caption, _, asked: [Turn(asked, text(caption))],
}
UNMARKED = ("texts", "question", "caption", "text")
