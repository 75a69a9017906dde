"""Tasks of a Label Studio export (its JSON format) as messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vlmpipe.trainer.data.accounting.keys import CONVERSATIONS, Record
from vlmpipe.trainer.data.conversations.message_parts import Kind, objects, text
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import IMAGE_SUFFIXES
from vlmpipe.trainer.data.video import VIDEOS

ANSWERS = ("text", "choices", "rating", "number")  # keys of a result's value that can be an answer
READ = frozenset({"id", "image", "images", "video", "videos", *CONVERSATIONS})  # of records, which tasks are made into
QUESTION = "question"  # field of a task's data
LOCAL_FILES, UPLOADS = "/data/local-files/", "/data/"  # addresses of files on the server's disk and of uploaded ones


def is_task(record: Mapping[str, Any]) -> bool:
    return "annotations" in record and isinstance(record.get("data"), dict) and isinstance(record["annotations"], list)


def task_messages(task: Mapping[str, Any], caption_question: str) -> Record:
    """A record with `messages`: one turn for each labelled control, about all images and videos of the task.

    The first question is `question` of the task's data, or `caption_question`; those of further controls are their
    names. The answer is that of the annotation marked as ground truth, or the first that was submitted. What of the
    data is neither is unread. Raises RejectedError.
    Source: https://labelstud.io/guide/export#Label-Studio-JSON-format-of-annotated-tasks
    """
    data = task["data"]
    answers = _answers(_annotation(task))
    files = list(_files(data))
    parts: list[dict[str, Any]] = [{"type": kind, kind: path} for _, kind, path in files]
    messages = []
    for number, (control, answer) in enumerate(answers.items()):
        asked = str(data.get(QUESTION) or caption_question) if number == 0 else control
        messages += [
            {"role": "user", "content": [*parts, {"type": "text", "text": asked}]},
            {"role": "assistant", "content": answer},
        ]
        parts = []
    left = {name: value for name, value in data.items() if name not in {QUESTION, *(name for name, *_ in files)}}
    renamed = {f"data.{name}" if name in READ else name: value for name, value in left.items()}
    return Record({**renamed, "id": task.get("id"), "messages": messages})


def _annotation(task: Mapping[str, Any]) -> dict[str, Any]:
    submitted = [one for one in objects(task["annotations"], "annotations") if not one.get("was_cancelled")]
    if not submitted:
        raise RejectedError(RejectCode.RECORD_FORM, "a task without a submitted annotation")
    return next((one for one in submitted if one.get("ground_truth")), submitted[0])


def _answers(annotation: Mapping[str, Any]) -> dict[str, str]:
    """The text of each control by its name."""
    found: dict[str, str] = {}
    for result in objects(annotation.get("result"), "result"):
        value, control = result.get("value"), str(result.get("from_name"))
        key = next((key for key in ANSWERS if isinstance(value, dict) and key in value), None)
        if key is None or not isinstance(value, dict):
            kind = result.get("type")
            message = f"a result of type {kind!r}: of a task's results, {', '.join(ANSWERS)} can be answers"
            raise RejectedError(RejectCode.RECORD_FORM, message)
        said = value[key]
        words = ", ".join(text(one, key) for one in said) if isinstance(said, list) else str(said)
        found[control] = f"{found[control]}\n{words}" if control in found else words
    if not found:
        raise RejectedError(RejectCode.RECORD_FORM, "an annotation without a result")
    return found


def _files(data: Mapping[str, Any]) -> Iterator[tuple[str, Kind, str]]:
    """Images and videos that the task's data names: the key, the kind and the path."""
    for name, value in data.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and (kind := _kind(path := _path(one))):
                yield name, kind, path


def _path(address: str) -> str:
    if address.startswith(LOCAL_FILES):
        return parse_qs(urlsplit(address).query).get("d", [""])[0]
    if address.startswith(("http://", "https://")):
        return address.partition("?")[0]  # without a signature
    return address.removeprefix(UPLOADS)


def _kind(path: str) -> Kind | None:
    suffix = PurePosixPath(path).suffix.lower()
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEOS else None
