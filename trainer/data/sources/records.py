"""Record shapes that data sets use for a conversation, and a record's id, slice and split."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from vlmpipe.trainer.config.data import BY_IMAGE, BY_RECORD
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import DEFAULT_SLICE, ImageRef, Split, Turn
from vlmpipe.trainer.data.sources.message_parts import MARKS, VIDEO_MARK, content_text, objects, text

QUESTION_ROLES = ("human", "user")
ANSWER_ROLES = ("gpt", "assistant")
EITHER_MARK = re.compile("|".join(map(re.escape, MARKS.values())))
THINKING = ("thinking", "reasoning_content")  # of an answer


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
    if turns and key in ALTERNATING and not turns[0].system and isinstance(record.get("system"), str):
        turns[0] = replace(turns[0], system=text(record["system"]))
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


def with_media(
    turns: Sequence[Turn],
    images: Sequence[ImageRef],
    videos: Sequence[Sequence[ImageRef]],
    times_s: Sequence[Sequence[float]] = (),
) -> tuple[tuple[Turn, ...], tuple[ImageRef, ...]]:
    """The turns with an image mark for each frame of the k-th video mark's video, and all images in the order of marks.

    A single video without a mark is placed before the first question. times_s: of each frame, to be written before it.
    Raises RejectedError where marks and files differ in number.
    """
    marks = re.findall(EITHER_MARK, "".join(text for turn in turns for text in (turn.question, turn.answer)))
    if videos and VIDEO_MARK not in marks and len(videos) == 1 and turns:
        turns = [replace(turns[0], question=f"{VIDEO_MARK}\n{turns[0].question}"), *turns[1:]]
        marks.insert(0, VIDEO_MARK)
    for mark, files, what in ((VIDEO_MARK, videos, "videos"), (IMAGE_TOKEN, images, "images")):
        if videos and marks.count(mark) != len(files):
            raise RejectedError(
                RejectCode.CONV_IMAGE_COUNT, f"{marks.count(mark)} {mark} marks for {len(files)} {what}"
            )
    if not videos:
        return tuple(turns), tuple(images)
    pictures, clips = iter(images), iter(videos)
    found = [image for mark in marks for image in (next(clips) if mark == VIDEO_MARK else [next(pictures)])]
    shown = [[f"<{time_s:.1f} seconds>{IMAGE_TOKEN}" for time_s in of_frames] for of_frames in times_s]
    left = iter(shown or [[IMAGE_TOKEN] * len(frames) for frames in videos])

    def filled(words: str) -> str:
        return re.sub(VIDEO_MARK, lambda _: "".join(next(left)), words)

    placed = [replace(turn, question=filled(turn.question), answer=filled(turn.answer)) for turn in turns]
    return tuple(placed), tuple(found)


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
    for message in objects(messages):
        roles.append(message.get(role_key))
        texts.append(content_text(message.get(text_key)))
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


def _chosen(chosen: Any, record: Mapping[str, Any]) -> list[Turn]:
    """A conversation whose last answer is preferred, perhaps with what comes before it under `prompt`."""
    before = record.get("prompt")
    return _alternating([*([] if before is None else objects(before)), *objects(chosen)], "role", "content")


def _last_answer(rejected: Any) -> str:
    """The rejected answer: a text, or messages that end with it."""
    if isinstance(rejected, str):
        return text(rejected)
    messages = objects(rejected)
    return content_text(messages[-1].get("content")) if messages else ""


def _pairs(turns: Any, question: str, answer: str) -> list[Turn]:
    return [Turn(text(turn.get(question)), text(turn.get(answer))) for turn in objects(turns)]


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
ALTERNATING = ("conversations", "messages")
UNMARKED = ("texts", "question", "caption", "text")
