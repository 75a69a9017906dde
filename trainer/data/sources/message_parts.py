"""Parts of messages as OpenAI, Hugging Face and Gemini write them: texts with marks, and the files that parts name."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError

Kind = Literal["image", "video"]
VIDEO_MARK = "<video>"
MARKS: dict[Kind, str] = {"image": IMAGE_TOKEN, "video": VIDEO_MARK}
KINDS: dict[str, Kind] = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}  # by `type`
ADDRESS_KEYS = ("url", "path")  # of a part, or of an object in it
GEMINI = "contents"  # key of a conversation in Gemini's tuning records
GEMINI_ROLES = {"user": "user", "model": "assistant"}


def as_messages(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record of Gemini's supervised tuning with `messages`; any other as it is. Raises RejectedError.

    Source: https://cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-supervised-tuning-prepare
    """
    if GEMINI not in record:
        return record
    said = [("system", record["systemInstruction"])] if record.get("systemInstruction") else []
    for content in objects(record[GEMINI]):
        role = content.get("role", "user")
        if role not in GEMINI_ROLES:
            raise RejectedError(RejectCode.CONV_ROLES, f"the role {role!r}, not user or model")
        said.append((GEMINI_ROLES[role], content))
    messages = [
        {"role": role, "content": [_of_gemini(part) for part in objects(one.get("parts"))]}
        for role, one in said
        if isinstance(one, dict)
    ]
    return {**record, "messages": messages}


def _of_gemini(part: Mapping[str, Any]) -> dict[str, Any]:
    if "text" in part:
        return {"type": "text", "text": part["text"]}
    file = part.get("fileData") or part.get("inlineData")
    mime = file.get("mimeType") if isinstance(file, dict) else None
    kind = str(mime).partition("/")[0]
    if not isinstance(file, dict) or kind not in MARKS:
        what = f"a file of type {mime}" if mime else f"a part with {', '.join(map(repr, part)) or 'nothing'}"
        raise RejectedError(RejectCode.RECORD_FORM, f"{what}, not a text, an image or a video")
    address = file["fileUri"] if "fileUri" in file else f"data:{mime};base64,{file.get('data')}"
    return {"type": kind, kind: address}


def content_text(content: Any) -> str:
    """A text, or the texts of a list of parts, with a mark in place of each image or video."""
    if not isinstance(content, list):
        return text(content)
    parts = (
        f"{MARKS[KINDS[part['type']]]}\n" if part.get("type") in KINDS else text(part.get("text"))
        for part in objects(content)
    )
    return "".join(parts)


def named_in(messages: Any) -> Iterator[tuple[Kind, str]]:
    """The files that parts of the messages name, in their order; nothing where files are listed beside the messages."""
    for message in objects(messages):
        content = message.get("content")
        for part in objects(content) if isinstance(content, list) else ():
            if (kind := part.get("type")) in KINDS and (address := _address(part, kind)) is not None:
                yield KINDS[kind], text(address)


def _address(part: Mapping[str, Any], kind: str) -> Any:
    value = part.get(kind)
    holder = value if isinstance(value, dict) else {**part, "url": value if value is not None else part.get("url")}
    return next((holder[key] for key in ADDRESS_KEYS if holder.get(key) is not None), None)


def inline_bytes(address: str, max_bytes: int) -> bytes | None:
    """The bytes of a base64 `data:` address (RFC 2397); None for other addresses. Raises RejectedError."""
    if not address.startswith("data:"):
        return None
    head, comma, encoded = address.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RejectedError(RejectCode.RECORD_FORM, f"a data: address that is not in base64: {head[:80]}")
    if len(encoded) * 3 // 4 > max_bytes + 2:
        message = f"about {len(encoded) * 3 // 4} bytes, more than data.max_image_bytes {max_bytes}"
        raise RejectedError(RejectCode.IMAGE_TOO_LARGE, message)
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise RejectedError(RejectCode.RECORD_FORM, f"a data: address that is not in base64: {error}") from error


def objects(value: Any) -> list[dict[str, Any]]:
    """The value, if it is a list of objects."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RejectedError(RejectCode.RECORD_FORM, "a conversation must be a list of objects")
    return value


def text(value: Any) -> str:
    """The value, if it is a text without lone surrogates, which JSON can spell and no tokenizer accepts."""
    if not isinstance(value, str):
        raise RejectedError(RejectCode.RECORD_FORM, f"a {type(value).__name__} where a text should be")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RejectedError(RejectCode.RECORD_ENCODING, f"a text that is not whole characters: {error}") from error
    return value
