"""Record shapes that data sets use for a conversation, and a record's id, slice and split."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.config.sources.data_fields import BY_IMAGE, BY_RECORD
from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.loss_flags import LOSS_FLAGS, is_learned
from vlmpipe.trainer.data.conversations.message_parts import (
    AUDIO_MARK,
    MARKS,
    VIDEO_MARK,
    content_text,
    kind_of,
    objects,
    text,
    with_plain_marks,
)
from vlmpipe.trainer.data.conversations.questions import asked
from vlmpipe.trainer.data.conversations.tools import (
    CALL_ROLES,
    RESULT_ROLES,
    TOOL_CALLS,
    TOOL_KEYS,
    TOOLS,
    calls_in,
    calls_json,
    calls_of_text,
    require_prepared,
    tools_json,
)
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import DEFAULT_SLICE, SPLIT_NAMES, ImageRef, Split, Turn, Unread
from vlmpipe.trainer.data.text_files.json_stream import BadJsonError, parse_json

QUESTION_ROLES = ("human", "user")
ANSWER_ROLES = ("gpt", "assistant")
ASKING_ROLES = (*QUESTION_ROLES, *RESULT_ROLES)
ANSWERING_ROLES = (*ANSWER_ROLES, *CALL_ROLES)
PLAIN_ROLES = (*QUESTION_ROLES, *ANSWER_ROLES)
ROLE_AND_TEXT = (("from", "value"), ("role", "content"))  # keys of messages
PAIR = 2
REJECTED = ("rejected", "rejected_response")  # the answer that is not preferred; the latter is ms-swift's
# Marks that other tools write, such as <image_1>, <image 1>, <|image|>, and <IMAGE> where a line begins or ends. Within
# a line it is a word, as in prose about a component of that name; <img> may be HTML.
OTHER_MARK = re.compile(
    r"<\|(image|video)[ _]?\d*\|>|<(image|video)[ _]?\d+>|^[ \t]*<(image|video)>|<(image|video)>[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
CLOSING = re.compile(r"</(image|video|audio)\s*>", re.IGNORECASE)  # of an element, in code
EITHER_MARK = re.compile("|".join(map(re.escape, MARKS.values())))
THINKING = ("thinking", "reasoning_content")  # of an answer
MESSAGE_KEYS = frozenset({"from", "value", "role", "content", *THINKING, *LOSS_FLAGS, *TOOL_KEYS})


def turns_of(record: Record, num_images: int, caption_question: str, keys: Sequence[str]) -> tuple[Turn, ...]:
    """The record's conversation, by the first of `keys` that it has.

    Shapes without `<image>` marks (question and answer, caption, the Cauldron's `texts`) get one for each image before
    the first question. Raises RejectedError.
    """
    key = next((key for key in keys if record.has(key)), None)
    if key is None:
        raise RejectedError(RejectCode.RECORD_FORM, f"nothing under {' or '.join(map(repr, keys))}")
    turns = SHAPES[key](record, caption_question)
    if turns and key in (*ALTERNATING, "response") and not turns[0].system and isinstance(record.peek("system"), str):
        turns[0] = replace(turns[0], system=text(record["system"], "system"))
    if turns and key in (*ALTERNATING, *TEXT_OR_MESSAGES) and record.has(TOOLS):
        turns[0] = replace(turns[0], tools=tools_json(record[TOOLS]))
    turns = with_plain_marks(turns, num_images)
    is_unmarked = key in UNMARKED or (key in TEXT_OR_MESSAGES and isinstance(record.peek(key), str))
    if is_unmarked and turns and not any(IMAGE_TOKEN in turn.question for turn in turns):
        turns[0] = replace(turns[0], question=f"{IMAGE_TOKEN}\n" * num_images + turns[0].question)
    names = _slices(record, key, len(turns))
    other = next((name for name in REJECTED if record.has(name)), "")
    if turns and other:
        turns[-1] = replace(turns[-1], rejected=_last_answer(record[other]))
    return tuple(_stripped(turn, name) for turn, name in zip(turns, names, strict=True))


def _stripped(turn: Turn, name: str) -> Turn:
    """The turn with the slice `name`, and without white space around its texts."""
    # Each record is read three times or more, and dataclasses.replace takes four times as long.
    question, answer, rejected = turn.question.strip(), turn.answer.strip(), turn.rejected.strip()
    texts = (question, answer, name, turn.system.strip(), turn.thinking.strip(), rejected)
    return Turn(*texts, turn.is_context, turn.region, turn.tools, turn.calls, turn.results)


def require_media(
    record: Record, turns: Sequence[Turn], images: int, videos: int, unread: Sequence[Unread] = ()
) -> None:
    """Raise RejectedError for a caption of nothing, and for marks of videos or sounds without any."""
    is_caption = not any(record.has(key) for key in SHAPES if key not in CAPTIONS)
    if is_caption and not images and not videos:
        named = ", ".join(f"{key.name} ({key.media})" for key in unread if key.media)
        hint = f"; not read: {named}, which data.columns can name as the image" if named else ""
        raise RejectedError(RejectCode.CONV_NO_MEDIA, f"a caption without an image{hint}")
    has_none = not images and not videos and not any(key.media for key in unread)
    for turn in turns:
        for words in (turn.question, turn.answer):
            if "<" not in words or CLOSING.search(words):
                continue
            if VIDEO_MARK in words and not videos:
                message = f"{VIDEO_MARK} without a video: the record names none under 'video' or 'videos'"
                raise RejectedError(RejectCode.CONV_NO_MEDIA, message)
            if has_none and (mark := OTHER_MARK.search(words)) and mark[0].strip() != IMAGE_TOKEN:
                message = f"{mark[0].strip()} without an image: the record names none under 'image' or 'images'"
                raise RejectedError(RejectCode.CONV_NO_MEDIA, message)
            if AUDIO_MARK in words:
                raise RejectedError(RejectCode.CONV_NO_MEDIA, f"{AUDIO_MARK}: sounds are not read")


def with_media(
    turns: Sequence[Turn],
    images: Sequence[ImageRef],
    videos: Sequence[Sequence[ImageRef]],
    times_s: Sequence[Sequence[float]] = (),
) -> tuple[tuple[Turn, ...], tuple[ImageRef, ...]]:
    """The turns with an image mark for each frame of the k-th video mark's video, and all images in the order of marks.

    A single video without a mark is placed before the first question. LLaVA-Video marks videos with `<image>`. times_s:
    of each frame, to be written before it. Raises RejectedError where marks and files differ in number.
    """
    marks = re.findall(EITHER_MARK, "".join(text for turn in turns for text in (turn.question, turn.answer)))
    if videos and not images and marks == [IMAGE_TOKEN] * len(videos):
        both = [[text.replace(IMAGE_TOKEN, VIDEO_MARK) for text in (turn.question, turn.answer)] for turn in turns]
        turns = [
            replace(turn, question=question, answer=other) for turn, (question, other) in zip(turns, both, strict=True)
        ]
        marks = [VIDEO_MARK] * len(videos)
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
    stills, clips = iter(images), iter(videos)
    media = [image for mark in marks for image in (next(clips) if mark == VIDEO_MARK else [next(stills)])]
    shown = [[f"<{time_s:.1f} seconds>{IMAGE_TOKEN}" for time_s in of_frames] for of_frames in times_s]
    left = iter(shown or [[IMAGE_TOKEN] * len(frames) for frames in videos])

    def filled(words: str) -> str:
        return re.sub(VIDEO_MARK, lambda _: "".join(next(left)), words)

    placed = [replace(turn, question=filled(turn.question), answer=filled(turn.answer)) for turn in turns]
    return tuple(placed), tuple(media)


def identity_of(record: Mapping[str, object], default: str = "") -> str:
    """The record's id as text; `default` where it has none."""
    identity = record.get("id")
    if identity is None or identity == "":
        return default
    if isinstance(identity, float) and identity.is_integer():
        return str(int(identity))  # pandas makes such of whole numbers
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise RejectedError(RejectCode.RECORD_FORM, f"'id' is {kind_of(identity)}, not a text or a whole number")
    return str(identity)


def split_named(record: Mapping[str, object]) -> Split | None:
    """The split that the record names, if any."""
    split = record.get("split")
    if split is None or split == "":
        return None
    named_split = SPLIT_NAMES.get(split.lower()) if isinstance(split, str) else None
    if named_split is None:
        known = ", ".join(SPLIT_NAMES)
        raise RejectedError(RejectCode.RECORD_FORM, f"'split' is {split!r}, not one of {known}")
    return named_split


def group_named(record: Mapping[str, object], split_by: str) -> str:
    """The record's value of the field that `data.split_by` names; empty where it names none."""
    if split_by in (BY_IMAGE, BY_RECORD):
        return ""
    value = record.get(split_by)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RejectedError(RejectCode.RECORD_FORM, f"{split_by!r} is {kind_of(value)}, not a text or a whole number")
    return text(str(value), split_by)


def listed(record: Record, key: str) -> object:
    """The list under the key, which may be written as a JSON text. Raises RejectedError."""
    value = record[key]
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return parse_json(value)
        except BadJsonError as error:
            raise RejectedError(RejectCode.RECORD_PARSE, f"{key!r} is not JSON: {error}") from error
    return value


def _slices(record: Record, key: str, turns: int) -> list[str]:
    slices = [turn.get("slice") for turn in objects(listed(record, key), key)] if key == "turns" else [None] * turns
    names = [record.get("slice", DEFAULT_SLICE) if name is None else name for name in slices]
    names = [DEFAULT_SLICE if name is None else name for name in names]
    if not all(isinstance(name, str) and name for name in names):
        raise RejectedError(RejectCode.RECORD_FORM, f"'slice' must be a name, not {record.get('slice')!r}")
    return [text(name, "slice") for name in names]


@dataclass(slots=True)
class _Said:
    """A message, or several in a row that are one: calls of tools and their results."""

    role: object
    text: str
    thinking: str = ""
    is_learned: bool = True
    calls: Sequence[dict[str, object]] = ()
    results: tuple[str, ...] = ()


def _alternating(record: Record, key: str, messages: object) -> list[Turn]:
    """Alternating questions and answers, perhaps after a system message."""
    spoken = _spoken(record, key, messages)
    system = spoken.pop(0).text if spoken and spoken[0].role == "system" else ""
    asked, answered = spoken[::2], spoken[1::2]
    known = all(message.role in ASKING_ROLES for message in asked) and all(
        message.role in ANSWER_ROLES for message in answered
    )
    if len(asked) != len(answered) or not known:
        roles = [message.role for message in spoken]
        raise RejectedError(RejectCode.CONV_ROLES, f"roles are {roles[:6]}, not human and gpt in turn")
    before: _Said | None = None
    for question, answer in zip(asked, answered, strict=True):
        if question.results and not (before and before.calls):
            raise RejectedError(RejectCode.CONV_ROLES, f"a message of the role {question.role!r} without a call before")
        before = answer
    turns = []
    for question, answer in zip(asked, answered, strict=True):
        texts = (question.text, answer.text, DEFAULT_SLICE, system, answer.thinking, "")
        calls = calls_json(answer.calls)
        turns.append(Turn(*texts, not answer.is_learned, (), "", calls, question.results))
        system = ""
    return turns


def _spoken(record: Record, key: str, messages: object) -> list[_Said]:
    spoken: list[_Said] = []
    for number, message in enumerate(objects(messages, key), 1):
        if plain := _plain_message(message):
            spoken.append(plain)
            continue
        place = f"{key} {number}"
        if left := message.keys() - MESSAGE_KEYS:
            record.note(left, message, key, place)
        role = _one_of(message, "from", "role", place)
        is_answer = role in ANSWERING_ROLES
        calls = calls_in(message, place) if TOOL_CALLS in message else []
        if calls and not is_answer:
            raise RejectedError(RejectCode.CONV_ROLES, f"{place} has {TOOL_CALLS!r} and the role {role!r}")
        flag = LOSS_FLAGS.isdisjoint(message) or is_learned(message, place, is_answer=is_answer)
        content = _one_of(message, "value", "content", place)
        words = "" if calls and content is None else content_text(content, place, record)
        thought = next((message[key] for key in THINKING if message.get(key) is not None), "")
        thinking = text(thought, place) if thought != "" else ""
        last = spoken[-1] if spoken else None
        if role in RESULT_ROLES and last and last.results:
            last.results += (words,)
        elif role in RESULT_ROLES:
            spoken.append(_Said(role, "", results=(words,)))
        elif role in CALL_ROLES and last and last.role in ANSWER_ROLES:
            last.calls = [*last.calls, *calls_of_text(words, place)]
            last.is_learned &= flag
        elif role in CALL_ROLES:
            spoken.append(_Said(ANSWER_ROLES[0], "", thinking, flag, calls_of_text(words, place)))
        else:
            spoken.append(_Said(role, words, thinking, flag, calls))
    return spoken


def _plain_message(message: Mapping[str, object]) -> _Said | None:
    """A question or an answer that holds a text and nothing else, as nearly all do; None for any other message."""
    if len(message) != len(ROLE_AND_TEXT[0]):
        return None
    for role_key, text_key in ROLE_AND_TEXT:
        role, words = message.get(role_key), message.get(text_key)
        if role in PLAIN_ROLES and isinstance(words, str) and words.isascii():
            return _Said(role, words)
    return None


def _one_of(message: Mapping[str, object], first: str, second: str, place: str) -> object:
    """The value under one of two keys. Raises RejectedError where both have one and they disagree."""
    value, other = message.get(first), message.get(second)
    if value is not None and other is not None and value != other:
        message_text = f"{place} has {first!r} and {second!r}, which disagree"
        raise RejectedError(RejectCode.RECORD_CONFLICT, message_text)
    return value if value is not None else other


def _chosen(record: Record, asked: str) -> list[Turn]:
    """A conversation whose last answer is preferred, with what comes before it under `prompt`, or a text beside
    `question`.
    """
    chosen, before = listed(record, "chosen"), record.get("prompt")
    if isinstance(chosen, str):
        question = record.get("question") if record.has("question") else before if isinstance(before, str) else asked
        return [Turn(text(question, "question"), text(chosen, "chosen"))]
    return _alternating(
        record, "chosen", [*([] if before is None else objects(before, "prompt")), *objects(chosen, "chosen")]
    )


def _completed(record: Record, _: str) -> list[Turn]:
    """TRL's prompt and completion: two texts, or two lists of messages, of which only the completion's are learned.

    Source: https://huggingface.co/docs/trl/dataset_formats#prompt-completion
    """
    completion = listed(record, "completion")
    if isinstance(completion, str):
        return [Turn(text(record.get("prompt"), "prompt"), text(completion, "completion"))]
    prompt = objects(listed(record, "prompt") if record.has("prompt") else None, "prompt")
    turns = _alternating(record, "completion", [*prompt, *objects(completion, "completion")])
    before = sum(message.role in ANSWER_ROLES for message in _spoken(record, "prompt", prompt))
    return [replace(turn, is_context=turn.is_context or number < before) for number, turn in enumerate(turns)]


def _responded(record: Record, _: str) -> list[Turn]:
    """ms-swift's query and response, after a history of such pairs.

    Source: https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html
    """
    pairs = listed(record, "history") if record.has("history") else []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == PAIR for pair in pairs):
        raise RejectedError(RejectCode.RECORD_FORM, "'history' is no list of pairs of a query and a response")
    spoken = [[text(words, f"history {number}") for words in pair] for number, pair in enumerate(pairs, 1)]
    last = Turn(text(record.get("query"), "query"), text(record["response"], "response"))
    return [*(Turn(question, answer) for question, answer in spoken), last]


def _last_answer(rejected: object) -> str:
    """The rejected answer: a text, or messages that end with it."""
    if isinstance(rejected, str):
        return text(rejected, "rejected")
    messages = objects(rejected, "rejected")
    return content_text(messages[-1].get("content"), f"rejected {len(messages)}") if messages else ""


CONTEXT = "is_context"  # of prepared data's turns
TURN_TEXTS = ("system", "thinking", "rejected", "tools", "calls")  # of prepared data, beside question and answer
RESULTS = "results"


def _pairs(record: Record, key: str, question: str, answer: str) -> list[Turn]:
    turns = list[Turn]()
    for number, turn in enumerate(objects(listed(record, key), key), 1):
        place = f"{key} {number}"
        more = {name: text(turn[name], f"{place}.{name}") for name in TURN_TEXTS if turn.get(name) is not None}
        if left := turn.keys() - {question, answer, "slice", *TURN_TEXTS, RESULTS, *LOSS_FLAGS, CONTEXT}:
            record.note(left, turn, key, place)
        is_context = turn.get(CONTEXT) is True or not is_learned(turn, place, is_answer=True)
        asked, answered = (text(turn.get(name), f"{place}.{name}") for name in (question, answer))
        results = turn.get(RESULTS) or []
        if not isinstance(results, list):
            raise RejectedError(RejectCode.RECORD_FORM, f"{place}.{RESULTS} is {kind_of(results)}, not a list")
        answers = tuple(text(result, f"{place}.{RESULTS}") for result in results)
        system, thinking, rejected, tools, calls = (more.get(name, "") for name in TURN_TEXTS)
        require_prepared(tools, calls, place)
        if answers and (asked.strip() or not (turns and turns[-1].calls)):
            why = "a question next to them" if asked.strip() else "no call before"
            raise RejectedError(RejectCode.RECORD_FORM, f"{place} has results of tools with {why}")
        texts = (asked, answered, DEFAULT_SLICE, system, thinking, rejected)
        turns.append(Turn(*texts, is_context, tools=tools, calls=calls, results=answers))
    return turns


# Key of a conversation -> its turns, from the record and data.caption_question.
SHAPES: dict[str, Callable[[Record, str], list[Turn]]] = {
    "conversations": lambda record, _: _alternating(record, "conversations", listed(record, "conversations")),
    "messages": lambda record, _: _alternating(record, "messages", listed(record, "messages")),
    "chosen": _chosen,
    "texts": lambda record, _: _pairs(record, "texts", "user", "assistant"),
    "turns": lambda record, _: _pairs(record, "turns", "question", "answer"),
    "question": lambda record, _: [Turn(*asked(record))],
    "caption": lambda record, asked: [Turn(asked, text(record["caption"], "caption"))],
    "text": lambda record, asked: [Turn(asked, text(record["text"], "text"))],
    "completion": _completed,
    "response": _responded,
}
ALTERNATING = ("conversations", "messages")
UNMARKED = ("texts", "question", "caption", "text", "response")
TEXT_OR_MESSAGES = ("chosen", "completion")
CAPTIONS = ("caption", "text")
