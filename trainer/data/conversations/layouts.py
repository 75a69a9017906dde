"""Layouts of published sets whose meaning is plain, as LLaVA's: MiniCPM-V's, Qwen-VL's first one, ImageFolder's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.message_parts import ADDRESS_KEYS, Kind, kind_of, text
from vlmpipe.trainer.data.conversations.records import listed
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError

NUMBERED = re.compile(r"<image_\d+>")  # MiniCPM-V's marks of several images
TAG = re.compile(r"(?:Picture \d+: ?)?<img>(.*?)</img>\n?", re.DOTALL)  # the first Qwen-VL's
FILE_NAME = "file_name"  # Hugging Face's ImageFolder, metadata.jsonl
CONVERSATIONS = ("conversations", "messages")


def as_llava(record: Record) -> Record:
    """The record in LLaVA's layout; as it is where it has that already. Raises RejectedError.

    Sources: https://github.com/OpenBMB/MiniCPM-V/blob/main/finetune/readme.md (images by mark, or before the first
    question), https://github.com/QwenLM/Qwen-VL#data-preparation (paths within <img>),
    https://huggingface.co/docs/datasets/image_dataset (file_name).
    """
    if record.has(FILE_NAME) and not record.has("image") and not record.has("images"):
        record = record.holding(image=record[FILE_NAME])
    key = next((key for key in CONVERSATIONS if record.has(key)), None)
    if key is None:
        return record
    if isinstance(record.peek("image"), dict) and all(map(NUMBERED.fullmatch, record.peek("image"))):
        return _numbered(record, key)
    image = record.peek("image")
    if not image and not record.peek("images"):
        return _tagged(record, key)
    if key == "conversations" and isinstance(image, str):
        value = listed(record, key)
        messages = value if isinstance(value, list) else []
        first = messages[0] if messages else None
        # MiniCPM-V's messages have roles, and an image without a mark stands before the first question.
        if isinstance(first, dict) and isinstance(first.get("content"), str) and not _text_has(messages, IMAGE_TOKEN):
            at = 1 if first.get("role") == "system" and len(messages) > 1 else 0
            marked = {**messages[at], "content": f"{IMAGE_TOKEN}\n{messages[at].get('content')}"}
            return record.holding(conversations=[*messages[:at], marked, *messages[at + 1 :]])
    return record


def _numbered(record: Record, key: str) -> Record:
    """Images by the names of their marks, in the order of the marks."""
    images, order = record["image"], []

    def mark(match: re.Match[str]) -> str:
        order.append(match[0])
        return IMAGE_TOKEN

    messages = _with_texts(listed(record, key), lambda words: NUMBERED.sub(mark, words))
    unknown = [name for name in order if name not in images]
    if unknown:
        raise RejectedError(RejectCode.CONV_IMAGE_COUNT, f"the mark {unknown[0]} without an image of that name")
    unused = [images[name] for name in images if name not in order]  # reported as too few marks
    return record.holding(**{key: messages, "image": [*(images[name] for name in order), *unused]})


def _tagged(record: Record, key: str) -> Record:
    messages = listed(record, key)
    if not _text_has(messages, "<img>"):
        return record
    paths: list[str] = []

    def mark(match: re.Match[str]) -> str:
        paths.append(match[1].strip())
        return f"{IMAGE_TOKEN}\n"

    return record.holding(**{key: _with_texts(messages, lambda words: TAG.sub(mark, words)), "images": paths})


def _text_has(messages: object, mark: str) -> bool:
    if not isinstance(messages, list):
        return False
    values = (message.get(key) for message in messages if isinstance(message, dict) for key in ("content", "value"))
    return any(isinstance(value, str) and mark in value for value in values)


def _with_texts(messages: object, change: Callable[[str], str]) -> object:
    """The messages with their texts changed, in order. What is no message stays, for its reader to refuse."""
    if not isinstance(messages, list):
        return messages
    changed: list[object] = []
    for message in messages:
        if not isinstance(message, dict):
            changed.append(message)
            continue
        texts = {key: change(message[key]) for key in ("content", "value") if isinstance(message.get(key), str)}
        changed.append({**message, **texts})
    return changed


def media_values(record: Record, kind: Kind) -> list[object]:
    """Values under `kind` and under its plural, which may both be there if they agree. Raises RejectedError."""
    if kind not in record and f"{kind}s" not in record:
        return []
    single, many = (_as_list(record.get(key), key) for key in (kind, f"{kind}s"))
    if single and many and single != many:
        raise RejectedError(RejectCode.RECORD_CONFLICT, f"{kind!r} and '{kind}s' name different files")
    return single or many


def _as_list(value: object, key: str) -> list[object]:
    if value is None or value == "":
        return []
    items = value if isinstance(value, list) else [value]
    odd = next((item for item in items if item is None or item == ""), 0)
    if odd != 0:
        raise RejectedError(RejectCode.RECORD_FORM, f"{key!r} has {kind_of(odd)} in its list, not a path")
    return items


def address_of(value: object, kind: Kind) -> str:
    """The address of a file, written as a text or as an object {path} or {url}. Raises RejectedError."""
    if isinstance(value, dict) and value.get("bytes") is None:
        value = next((value[key] for key in ADDRESS_KEYS if value.get(key) is not None), None)
    return text(value, kind)


def require_same(listed_files: Mapping[Kind, Sequence[str]], named: Sequence[tuple[Kind, str]]) -> None:
    """Raise RejectedError where parts of messages name other files than the record lists."""
    for kind, files in listed_files.items():
        in_parts = [address for of_kind, address in named if of_kind == kind]
        if in_parts and in_parts != list(files):
            message = f"parts of messages name other files than {kind!r} or '{kind}s'"
            raise RejectedError(RejectCode.RECORD_CONFLICT, message)
