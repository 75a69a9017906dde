"""LLaVA's format: a JSON array or JSON lines of conversations about images in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO

from trainer.data.rejects import Reject, RejectCode, RejectedError
from trainer.data.sample import Sample, stable_digest
from trainer.data.sources.file_patterns import Files
from trainer.data.sources.image_files import open_image_files
from trainer.data.sources.json_stream import BadJsonError, JsonReader, parse_json
from trainer.data.sources.parts import OnePart
from trainer.data.sources.records import group_named, identity_of, split_named, text, turns_of
from trainer.errors import DataError, os_errors
from trainer.storage.regular_files import open_regular

CONVERSATION_KEYS = ("conversations", "messages")
FORMAT_PROBE_RECORDS = 20  # if none of the first ones is a conversation, the file is something else
LONGEST_LINE_BYTES = 64 << 20
EXAMPLE = """[{"id": "1", "image": "cats/1.jpg", "conversations": [
  {"from": "human", "value": "<image>\\nWhat is this?"},
  {"from": "gpt", "value": "A cat."}]}]"""

Record = tuple[str, Any]  # where it is, and what the JSON says


class LlavaSource(OnePart):
    """Samples of one `.json` or `.jsonl` file, read one by one."""

    def __init__(
        self, files: Files, image_folder: str, caption_question: str, split_by: str, max_image_bytes: int
    ) -> None:
        self._files, self._caption_question, self._split_by = files, caption_question, split_by
        self._name = files.names[0]
        self._path = files.path(self._name)
        self._images = open_image_files(image_folder, files.storage, max_image_bytes)
        self._check_format()

    def fingerprint(self) -> str:
        """Covers the file's bytes, and name, size and time of change of every image it refers to."""
        names = (image.name for sample in self if isinstance(sample, Sample) for image in sample.images)
        return f"llava {self._files.fingerprint()} {self._images.fingerprint(names)}"

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
        with os_errors(f"reading {self._path}"), open_regular(self._path) as file:
            yield from self._lines(file) if self._name.endswith(".jsonl") else self._array(file)

    def _lines(self, file: BinaryIO) -> Iterator[Record]:
        number = 0
        while line := file.readline(LONGEST_LINE_BYTES + 1):
            number += 1
            where = f"{self._name} line {number}"
            if len(line) > LONGEST_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(LONGEST_LINE_BYTES)
                yield where, Reject(where, "", RejectCode.RECORD_PARSE, f"more than {LONGEST_LINE_BYTES} bytes")
                continue
            try:
                content = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if content:
                    yield where, parse_json(content)
            except UnicodeDecodeError as error:
                yield where, Reject(where, "", RejectCode.RECORD_ENCODING, f"not UTF-8: {error}")
            except BadJsonError as error:
                yield where, Reject(where, "", RejectCode.RECORD_PARSE, f"not JSON: {error}")

    def _array(self, file: BinaryIO) -> Iterator[Record]:
        """A damaged array is refused as a whole: nobody can say how many records are lost behind the damage."""
        reader = JsonReader(file)
        number = 0
        try:
            for number, record in enumerate(reader.items(), 1):
                yield f"{self._name} record {number}", record
            reader.end()
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path} is not UTF-8 text: {error}", expected="JSON in UTF-8") from error
        except BadJsonError as error:
            behind = f" (behind record {number})" if number else ""
            raise DataError(
                f"{self._path} is not JSON: {error}{behind}",
                expected=f"one JSON array of LLaVA records, like\n{EXAMPLE}",
            ) from error

    def _check_format(self) -> None:
        """A whole file of another format is one sentence, not a million rejects."""
        first = [record for _, record in islice(self._records(), FORMAT_PROBE_RECORDS)]
        if not first:
            raise DataError(f"{self._path} holds no records", expected=f"LLaVA records, like\n{EXAMPLE}")
        if not any(isinstance(record, dict) and any(key in record for key in CONVERSATION_KEYS) for record in first):
            raise self._not_llava(first[0])

    def _sample(self, where: str, record: Any) -> Sample:
        if not isinstance(record, dict):
            raise RejectedError(RejectCode.RECORD_FORM, f"a {type(record).__name__} where a record should be")
        images = tuple(self._images.reference(path) for path in _image_paths(record))
        turns = turns_of(record, len(images), self._caption_question, CONVERSATION_KEYS)
        identity = identity_of(record, "") or stable_digest(record)[:16]
        return Sample(identity, turns, images, where, split_named(record), group_named(record, self._split_by))

    def _not_llava(self, found: Any) -> DataError:
        if isinstance(found, Reject):
            what = found.message
        elif isinstance(found, dict):
            what = "an object with the keys " + (", ".join(map(repr, list(found)[:8])) or "none")
        else:
            what = f"a {type(found).__name__}"
        return DataError(
            f"{self._path} is not in LLaVA's format: found {what}",
            expected=f"records with the keys 'id', 'image' and 'conversations', like\n{EXAMPLE}",
            fix="convert the file; docs/reference/data-formats.md describes each key",
        )


def _image_paths(record: dict[str, Any]) -> list[str]:
    key = "images" if record.get("image") is None and record.get("images") is not None else "image"
    image = record.get(key)
    paths = [image] if isinstance(image, str) else image or []
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise RejectedError(RejectCode.RECORD_FORM, f"{key!r} must be a path or a list of paths")
    return [text(path) for path in paths]
