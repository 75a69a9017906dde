"""LLaVA's format: a JSON array or JSON lines of conversations about images in a local folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from trainer.data.checks import IMAGE_SUFFIXES
from trainer.data.rejects import Reject, RejectCode, RejectedError
from trainer.data.samples import DEFAULT_SLICE, ImageRef, Sample, Split, Turn, stable_digest
from trainer.errors import ConfigError, DataError, os_errors
from trainer.storage import CHUNK_BYTES, mounted

QUESTION_ROLES = {"human", "user"}
ANSWER_ROLES = {"gpt", "assistant"}
FORMAT_PROBE_RECORDS = 20  # if none of the first ones is a conversation, the file is something else
EXAMPLE = """[{"id": "1", "image": "cats/1.jpg", "conversations": [
  {"from": "human", "value": "<image>\\nWhat is this?"},
  {"from": "gpt", "value": "A cat."}]}]"""

Record = tuple[str, Any]  # where it is, and what the JSON says


class LlavaSource:
    """Samples of a `.json` or `.jsonl` file. JSON lines are read one by one, an array as a whole."""

    def __init__(self, path: str, image_folder: str) -> None:
        self._path = mounted(path)
        if self._path.suffix not in (".json", ".jsonl"):
            raise ConfigError(
                f"data.source {path!r} is neither a built-in set nor a .json or .jsonl file",
                expected="builtin:<name>, or the path of a LLaVA file that ends in .json or .jsonl",
            )
        if not self._path.is_file():
            raise ConfigError(
                f"data.source {path!r} does not exist (looked for {self._path.resolve()})",
                expected="an existing LLaVA file; a relative path starts at the current folder",
            )
        self._folder = _image_folder(image_folder, self._path)
        self._check_format()

    def fingerprint(self) -> str:
        """Covers the file's bytes, and name, size and time of change of every image it refers to."""
        digest = hashlib.sha256()
        with os_errors(f"reading {self._path}"), self._path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        for sample in self:
            if isinstance(sample, Sample):
                for image in sample.images:
                    digest.update(_file_state(image.name).encode())
        return f"llava {digest.hexdigest()}"

    def __iter__(self) -> Iterator[Sample | Reject]:
        for where, record in self._records():
            if isinstance(record, Reject):
                yield record
                continue
            try:
                yield self._sample(where, record)
            except RejectedError as error:
                identity = str(record.get("id", "")) if isinstance(record, dict) else ""
                yield Reject(where, identity, error.code, str(error))

    def _records(self) -> Iterator[Record]:
        """Parsed records; a Reject in place of a line that is not JSON."""
        if self._path.suffix == ".jsonl":
            yield from self._lines()
            return
        for number, record in enumerate(self._array, 1):
            yield f"{self._path.name} record {number}", record

    def _lines(self) -> Iterator[Record]:
        with os_errors(f"reading {self._path}"), self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{self._path.name} line {number}"
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                    if text:
                        yield where, json.loads(text)
                except UnicodeDecodeError as error:
                    yield where, Reject(where, "", RejectCode.JSON_ENCODING, f"not UTF-8: {error}")
                except json.JSONDecodeError as error:
                    yield where, Reject(where, "", RejectCode.JSON_PARSE, f"not JSON: {error}")

    @cached_property
    def _array(self) -> list[Any]:
        with os_errors(f"reading {self._path}"):
            data = self._path.read_bytes()
        try:
            records = json.loads(data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path} is not UTF-8 text: {error}", expected="JSON in UTF-8") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self._path} is not JSON: {error}",
                expected=f"one JSON array of LLaVA records, like\n{EXAMPLE}",
                fix="if each line is a record of its own, name the file .jsonl" if data.lstrip()[:1] == b"{" else "",
            ) from error
        if not isinstance(records, list):
            raise _not_llava(self._path, records)
        return records

    def _check_format(self) -> None:
        """A whole file of another format is one sentence, not a million rejects."""
        first = [record for _, record in islice(self._records(), FORMAT_PROBE_RECORDS)]
        if not first:
            raise DataError(f"{self._path} holds no records", expected=f"LLaVA records, like\n{EXAMPLE}")
        if not any(isinstance(record, dict) and "conversations" in record for record in first):
            raise _not_llava(self._path, first[0])

    def _sample(self, where: str, record: Any) -> Sample:
        if not isinstance(record, dict) or not isinstance(record.get("conversations"), list):
            raise RejectedError(RejectCode.JSON_RECORD, "no list under the key 'conversations'")
        slice_name = record.get("slice", DEFAULT_SLICE)
        if not isinstance(slice_name, str) or not slice_name:
            raise RejectedError(RejectCode.JSON_RECORD, f"'slice' must be a name, not {slice_name!r}")
        split = record.get("split")
        if split is not None and split not in get_args(Split):
            raise RejectedError(RejectCode.JSON_RECORD, f"'split' must be train or eval, not {split!r}")
        turns = _turns(record["conversations"], slice_name)
        images = tuple(self._image(path) for path in _image_paths(record))
        identity = record.get("id")
        if identity is None:
            identity = stable_digest(record)[:16]
        return Sample(str(identity), turns, images, where, split)

    def _image(self, path: str) -> ImageRef:
        target = self._folder / path
        if "\0" in path or not target.resolve().is_relative_to(self._folder):
            raise RejectedError(RejectCode.REF_UNSAFE_PATH, f"image {path!r} is outside {self._folder}")
        return ImageRef(str(target), partial(_read_image, target))


def _turns(messages: list[Any], slice_name: str) -> tuple[Turn, ...]:
    """Question and answer in turn. A system message first becomes the start of the first question."""
    roles, texts = [], []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            raise RejectedError(RejectCode.JSON_RECORD, "a message needs 'from' and a text under 'value'")
        roles.append(message.get("from"))
        texts.append(message["value"].strip())
    if roles and roles[0] == "system":
        roles.pop(0)
        system = texts.pop(0)
        texts[:1] = [f"{system}\n{texts[0]}" if system else texts[0]] if texts else []
    asked, answered = roles[::2], roles[1::2]
    if len(asked) != len(answered) or not set(asked) <= QUESTION_ROLES or not set(answered) <= ANSWER_ROLES:
        raise RejectedError(RejectCode.CONV_ROLES, f"roles are {roles[:6]}, not human and gpt in turn")
    return tuple(Turn(q, a, slice_name) for q, a in zip(texts[::2], texts[1::2], strict=True))


def _image_paths(record: dict[str, Any]) -> list[str]:
    image = record.get("image")
    paths = [image] if isinstance(image, str) else image or []
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise RejectedError(RejectCode.JSON_RECORD, "'image' must be a path or a list of paths")
    return paths


def _read_image(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RejectedError(RejectCode.REF_MISSING, f"{path}: {error.strerror}") from error


def _file_state(path: str) -> str:
    try:
        stat = os.stat(path)
    except OSError:
        return f"{path} missing\n"
    return f"{path} {stat.st_size} {stat.st_mtime_ns}\n"


def _image_folder(image_folder: str, source: Path) -> Path:
    """The folder that image paths start at. A folder that is named must exist and hold images."""
    if not image_folder:
        return source.parent.resolve()
    folder = mounted(image_folder).resolve()
    if not folder.is_dir():
        raise ConfigError(
            f"data.image_folder {image_folder!r} is not a folder (looked for {folder})",
            expected="the folder that the image paths in the LLaVA file are relative to",
        )
    names = (name for _, _, files in os.walk(folder) for name in files)
    if not any(Path(name).suffix.lower() in IMAGE_SUFFIXES for name in names):
        raise DataError(
            f"data.image_folder {image_folder!r} holds no images (looked in {folder} and below)",
            expected="files that end in " + ", ".join(sorted(IMAGE_SUFFIXES)),
        )
    return folder


def _not_llava(path: Path, found: Any) -> DataError:
    if isinstance(found, Reject):
        what = found.message
    elif isinstance(found, dict):
        what = "an object with the keys " + (", ".join(map(repr, list(found)[:8])) or "none")
    else:
        what = f"a {type(found).__name__}"
    return DataError(
        f"{path} is not in LLaVA's format: found {what}",
        expected=f"records with the keys 'id', 'image' and 'conversations', like\n{EXAMPLE}",
        fix="convert the file; docs/reference/data-formats.md describes each key",
    )
