"""Parts of messages as OpenAI, Hugging Face, DashScope and Gemini write them: texts with marks, and files they name."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.accounting.keys import Record, is_encoded
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import Turn

Kind = Literal["image", "video"]
VIDEO_MARK, AUDIO_MARK = "<video>", "<audio>"
MARKS: dict[Kind, str] = {"image": IMAGE_TOKEN, "video": VIDEO_MARK}
NUMBERED_MARK = re.compile(r"<\|?image[ _]?(\d+)\|?>", re.IGNORECASE)  # <image 1> (MMMU), <|image_1|> (Phi-3)
KINDS: dict[str, Kind] = {  # by `type`
    "image": "image", "image_url": "image", "input_image": "image", "video": "video", "video_url": "video",
}  # fmt: skip
TEXTS = ("text", "input_text", "output_text")  # values of `type`
ADDRESS_KEYS = ("url", "path")  # of a part, or of an object in it
PART_KEYS = frozenset({"type", "text", *KINDS, *ADDRESS_KEYS})
GEMINI = "contents"  # key of a conversation in Gemini's tuning records
GEMINI_ROLES = {"user": "user", "model": "assistant"}
GEMINI_KEYS = frozenset({"text", "fileData", "file_data", "inlineData", "inline_data"})


def as_messages(record: Record) -> Record:
    """A record of Gemini's supervised tuning with `messages`; any other as it is. Raises RejectedError.

    Keys are read as the service's JSON spells them and as Google's Python types do (systemInstruction,
    system_instruction).
    Source: https://cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-supervised-tuning-prepare
    """
    if not record.has(GEMINI):
        return record
    system = _either(record, "systemInstruction", "system_instruction")
    spoken: list[tuple[str, Mapping[str, object]]] = []
    if system:
        spoken.append(("system", system if isinstance(system, dict) else {"parts": [{"text": system}]}))
    for number, content in enumerate(objects(record[GEMINI], GEMINI), 1):
        role = content.get("role", "user")
        if role not in GEMINI_ROLES:
            raise RejectedError(RejectCode.CONV_ROLES, f"{GEMINI} {number} has the role {role!r}, not user or model")
        record.note(content.keys() - {"role", "parts"}, content, GEMINI, f"{GEMINI} {number}")
        spoken.append((GEMINI_ROLES[role], content))
    messages = [
        {"role": role, "content": [_of_gemini(part, record) for part in objects(content.get("parts"), "parts")]}
        for role, content in spoken
    ]
    return record.holding(messages=messages).took("messages")


def _either(holder: Mapping[str, object], *names: str) -> object:
    return next((value for name in names if (value := holder.get(name)) is not None), None)


def _of_gemini(part: Mapping[str, object], record: Record) -> dict[str, object]:
    record.note(part.keys() - GEMINI_KEYS, part, "parts", "a part")
    if part.get("text") is not None:
        return {"type": "text", "text": part["text"]}
    file = _either(part, "fileData", "file_data", "inlineData", "inline_data")
    mime = _either(file, "mimeType", "mime_type") if isinstance(file, dict) else None
    kind = str(mime).partition("/")[0]
    if not isinstance(file, dict) or kind not in MARKS:
        what = f"a file of type {mime}" if mime else f"a part with {', '.join(map(repr, part)) or 'nothing'}"
        raise RejectedError(RejectCode.RECORD_FORM, f"{what}, not a text, an image or a video")
    address = _either(file, "fileUri", "file_uri")
    return {"type": kind, kind: address if address is not None else f"data:{mime};base64,{file.get('data')}"}


def content_text(content: object, field: str, record: Record | None = None) -> str:
    """A text, or the texts of a list of parts, with a mark in place of each image or video.

    `field` names it in errors. What no reader takes of parts is noted in `record`.
    """
    if not isinstance(content, list):
        return text(content, field)
    written = []
    for number, part in enumerate(objects(content, field), 1):
        place = f"{field} part {number}"
        if record is not None and (left := part.keys() - PART_KEYS):
            record.note(left, part, field.partition(" ")[0], place)
        kind = _kind_of(part, place)
        written.append(f"{MARKS[kind]}\n" if kind else text(part.get("text"), f"{place}.text"))
    return "".join(written)


def _kind_of(part: Mapping[str, object], place: str) -> Kind | None:
    """Kind of a part; None for a text. Parts of DashScope have no type. Raises RejectedError for other kinds."""
    named = part.get("type")
    if named is None:
        kinds = [KINDS[key] for key in KINDS if part.get(key) is not None]
        return kinds[0] if kinds else None
    if named in KINDS:
        return KINDS[named]
    if named in TEXTS:
        return None
    message = f"{place} has the type {named!r}, not {', '.join((*TEXTS, *KINDS))}"
    raise RejectedError(RejectCode.RECORD_FORM, message)


def named_in(messages: object) -> Iterator[tuple[Kind, str]]:
    """The files that parts of the messages name, in their order; nothing where files are listed beside the messages."""
    for number, message in enumerate(objects(messages, "messages"), 1):
        content = message.get("content")
        for part in objects(content, "content") if isinstance(content, list) else ():
            kind = _kind_of(part, f"messages {number}")
            if kind and (address := _address(part)) is not None:
                yield kind, text(address, f"messages {number}: the address of its {kind}")


def _address(part: Mapping[str, object]) -> object:
    value = next((part[key] for key in KINDS if part.get(key) is not None), None)
    source = part.get("source")  # in logs of some chat services: {media_type, data} or {url}
    if value is None and isinstance(source, dict):
        if source.get("data") is not None:
            return f"data:{source.get('media_type')};base64,{source['data']}"
        value = source
    holder = value if isinstance(value, dict) else {**part, "url": value if value is not None else part.get("url")}
    return next((holder[key] for key in ADDRESS_KEYS if holder.get(key) is not None), None)


def with_plain_marks(turns: list[Turn], num_images: int) -> list[Turn]:
    """The turns with `<image>` in place of each numbered mark, where they have no other; the first is 0 or 1.

    Raises RejectedError where the marks are not those of all images, once each and in their order.
    """
    if not num_images or any(IMAGE_TOKEN in words for turn in turns for words in (turn.question, turn.answer)):
        return turns
    texts = "".join(words for turn in turns for words in (turn.question, turn.answer) if "<" in words)
    numbers = [int(number) for number in NUMBERED_MARK.findall(texts)] if texts else []
    if not numbers:
        return turns
    if numbers[0] > 1 or numbers != list(range(numbers[0], numbers[0] + num_images)):
        shown = ", ".join(map(str, numbers[:8]))
        message = f"marks of the images {shown} for {num_images} images, not each once and in the order of the images"
        raise RejectedError(RejectCode.CONV_IMAGE_COUNT, message)
    return [
        replace(
            turn,
            question=NUMBERED_MARK.sub(IMAGE_TOKEN, turn.question),
            answer=NUMBERED_MARK.sub(IMAGE_TOKEN, turn.answer),
        )
        for turn in turns
    ]


def inline_bytes(address: str, max_bytes: int) -> bytes | None:
    """The bytes of a base64 `data:` address (RFC 2397), or of an image in bare base64; None for other addresses.

    Raises RejectedError.
    """
    if is_encoded(address):
        return from_base64("".join(address.split()), max_bytes, "an image in base64 that")
    if not address.startswith("data:"):
        return None
    head, comma, encoded = address.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RejectedError(RejectCode.RECORD_FORM, f"a data: address that is not in base64: {head[:80]}")
    return from_base64(encoded, max_bytes, "a data: address that")


def from_base64(encoded: str, max_bytes: int, what: str) -> bytes:
    """The bytes of a text in base64. Raises RejectedError."""
    if len(encoded) * 3 // 4 > max_bytes + 2:
        message = f"about {len(encoded) * 3 // 4} bytes, more than data.max_image_bytes {max_bytes}"
        raise RejectedError(RejectCode.IMAGE_TOO_LARGE, message)
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RejectedError(RejectCode.RECORD_FORM, f"{what} is not in base64: {error}") from error


def objects(value: object, field: str) -> list[dict[str, object]]:
    """The value, if it is a list of objects. Raises RejectedError, which names `field`."""
    if not isinstance(value, list):
        raise RejectedError(RejectCode.RECORD_FORM, f"{field!r} is {kind_of(value)}, not a list of objects")
    odd = next((number for number, item in enumerate(value, 1) if not isinstance(item, dict)), None)
    if odd is not None:
        message = f"{field!r} has {kind_of(value[odd - 1])} as its item {odd}, not an object"
        raise RejectedError(RejectCode.RECORD_FORM, message)
    return value


def text(value: object, field: str) -> str:
    """The value, if it is a text without lone surrogates, which JSON can spell and no tokenizer accepts."""
    if not isinstance(value, str):
        raise RejectedError(RejectCode.RECORD_FORM, f"{field!r} is {kind_of(value)}, not a text")
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f"{field!r} is a text that is not whole characters: {error}"
        raise RejectedError(RejectCode.RECORD_ENCODING, message) from error
    return value


def kind_of(value: object) -> str:
    """Name the kind of a value of JSON or of a column, for people."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true or false"
    names = {int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object", bytes: "bytes"}
    names[tuple] = "a column of lists of numbers"  # see `accounting.keys.VECTOR`
    return next((name for kind, name in names.items() if isinstance(value, kind)), "of another type")
