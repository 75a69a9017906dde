"""Tasks of a Label Studio export (its JSON format) as messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vlmpipe.trainer.data.media import VIDEOS
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import IMAGE_SUFFIXES
from vlmpipe.trainer.data.sources.message_parts import Kind, objects, text

ANSWERS = ("text", "choices", "rating", "number")  # keys of a result's value that can be an answer
QUESTION = "question"  # field of a task's data
LOCAL_FILES, UPLOADS = "/data/local-files/", "/data/"  # addresses of files on the server's disk and of uploaded ones
NOT_SCALARS = ("conversations", "messages", "chosen", "image", "images", "video", "videos")


def is_task(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("data"), dict) and isinstance(record.get("annotations"), list)


def task_messages(task: Mapping[str, Any], caption_question: str) -> dict[str, Any]:
    """A record with `messages`: one turn for each labelled control, about all images and videos of the task.

    The first question is `question` of the task's data, or `caption_question`; those of further controls are their
    names. The answer is that of the annotation marked as ground truth, or the first that was submitted. Raises
    RejectedError. Source: https://labelstud.io/guide/export#Label-Studio-JSON-format-of-annotated-tasks
    """
    data = task["data"]
    answers = _answers(_annotation(task))
    parts: list[dict[str, Any]] = [{"type": kind, kind: path} for kind, path in _files(data)]
    messages = []
    for number, (control, answer) in enumerate(answers.items()):
        asked = str(data.get(QUESTION) or caption_question) if number == 0 else control
        messages += [
            {"role": "user", "content": [*parts, {"type": "text", "text": asked}]},
            {"role": "assistant", "content": answer},
        ]
        parts = []
    kept = {key: value for key, value in data.items() if isinstance(value, str | int) and key not in NOT_SCALARS}
    return {**kept, "id": task.get("id"), "messages": messages}


def _annotation(task: Mapping[str, Any]) -> dict[str, Any]:
    submitted = [one for one in objects(task["annotations"]) if not one.get("was_cancelled")]
    if not submitted:
        raise RejectedError(RejectCode.RECORD_FORM, "a task without a submitted annotation")
    return next((one for one in submitted if one.get("ground_truth")), submitted[0])


def _answers(annotation: Mapping[str, Any]) -> dict[str, str]:
    """The text of each control by its name."""
    found: dict[str, str] = {}
    for result in objects(annotation.get("result")):
        value, control = result.get("value"), str(result.get("from_name"))
        key = next((key for key in ANSWERS if isinstance(value, dict) and key in value), None)
        if key is None or not isinstance(value, dict):
            kind = result.get("type")
            message = f"a result of type {kind!r}: of a task's results, {', '.join(ANSWERS)} can be answers"
            raise RejectedError(RejectCode.RECORD_FORM, message)
        said = value[key]
        words = ", ".join(map(text, said)) if isinstance(said, list) else str(said)
        found[control] = f"{found[control]}\n{words}" if control in found else words
    if not found:
        raise RejectedError(RejectCode.RECORD_FORM, "an annotation without a result")
    return found


def _files(data: Mapping[str, Any]) -> Iterator[tuple[Kind, str]]:
    """Images and videos that the task's data names, as paths."""
    for value in data.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and (kind := _kind(path := _path(one))):
                yield kind, path


def _path(address: str) -> str:
    if address.startswith(LOCAL_FILES):
        return parse_qs(urlsplit(address).query).get("d", [""])[0]
    return address.removeprefix(UPLOADS)


def _kind(path: str) -> Kind | None:
    suffix = PurePosixPath(path).suffix.lower()
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEOS else None
