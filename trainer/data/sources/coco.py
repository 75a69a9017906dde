"""COCO captions: one JSON object with the lists `images` and `annotations`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

from trainer.data.rejects import Reject, RejectCode, RejectedError
from trainer.data.sample import Sample
from trainer.data.sources.file_patterns import Files
from trainer.data.sources.image_files import open_image_files
from trainer.data.sources.json_stream import BadJsonError, JsonReader
from trainer.data.sources.parts import OnePart
from trainer.data.sources.records import group_named, identity_of, split_named, text, turns_of
from trainer.data.sqlite_table import disk_table
from trainer.errors import DataError, os_errors
from trainer.storage.regular_files import open_regular

EXAMPLE = """{"images": [{"id": 1, "file_name": "cats/1.jpg"}],
 "annotations": [{"id": 7, "image_id": 1, "caption": "A cat on a mat."}]}"""


class CocoSource(OnePart):
    """One sample a caption."""

    def __init__(
        self, files: Files, image_folder: str, caption_question: str, split_by: str, max_image_bytes: int
    ) -> None:
        self._files, self._caption_question = files, caption_question
        self._split_by = split_by
        self._name = files.names[0]
        self._path = files.path(self._name)
        self._images = open_image_files(image_folder, files.storage, max_image_bytes)
        if next(iter(self), None) is None:
            raise DataError(f"{self._path} holds no captions", expected=f"COCO captions, like\n{EXAMPLE}")

    def fingerprint(self) -> str:
        """Covers the file's bytes, and name, size and time of change of every image that has a caption."""
        names = (image.name for sample in self if isinstance(sample, Sample) for image in sample.images)
        return f"coco {self._files.fingerprint()} {self._images.fingerprint(names)}"

    def __iter__(self) -> Iterator[Sample | Reject]:
        files = disk_table("CREATE TABLE files (image TEXT PRIMARY KEY, name TEXT) WITHOUT ROWID")
        for record in self._members("images"):
            if isinstance(record, dict) and isinstance(record.get("file_name"), str) and _is_id(record.get("id")):
                name = record["file_name"].encode("utf-8", "replace").decode()
                files.execute("INSERT OR IGNORE INTO files VALUES (?, ?)", (str(record["id"]), name))
        for number, record in enumerate(self._members("annotations"), 1):
            where = f"{self._name} annotation {number}"
            try:
                yield self._sample(record, files, where)
            except RejectedError as error:
                identity = str(record.get("id", "")) if isinstance(record, dict) else ""
                yield Reject(where, identity, error.code, str(error))

    def _sample(self, record: Any, files: sqlite3.Connection, where: str) -> Sample:
        if not isinstance(record, dict):
            raise RejectedError(RejectCode.RECORD_FORM, f"a {type(record).__name__} where an annotation should be")
        image_id = record.get("image_id")
        if not _is_id(image_id):
            raise RejectedError(
                RejectCode.RECORD_FORM, f"'image_id' must be a text or a whole number, not {image_id!r}"
            )
        image_id = text(str(image_id))
        found = files.execute("SELECT name FROM files WHERE image = ?", (image_id,)).fetchone()
        if found is None:
            raise RejectedError(RejectCode.REF_MISSING, f"no image with the id {image_id!r} in the file")
        image = self._images.reference(found[0])
        turns = turns_of(record, 1, self._caption_question, ("caption",))
        identity, group = identity_of(record, f"coco-{where.rpartition(' ')[2]}"), group_named(record, self._split_by)
        return Sample(identity, turns, (image,), where, split_named(record), group)

    def _members(self, wanted: str) -> Iterator[Any]:
        """The items of one of the object's lists. A damaged file is refused as a whole."""
        met = []
        try:
            with os_errors(f"reading {self._path}"), open_regular(self._path) as file:
                reader = JsonReader(file)
                for key in reader.keys():  # noqa: SIM118 (a reader is not a dictionary)
                    met.append(key)
                    if key == wanted and reader.peek() == "[":
                        yield from reader.items()
                    else:
                        reader.skip()
                if reader.peek() == "{":
                    raise DataError(
                        f"{self._path} holds several JSON objects", fix="if each line is a record, name the file .jsonl"
                    )
                reader.end()
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path} is not UTF-8 text: {error}", expected="JSON in UTF-8") from error
        except BadJsonError as error:
            raise DataError(f"{self._path} is not JSON: {error}", expected=f"COCO captions, like\n{EXAMPLE}") from error
        if wanted not in met:
            raise DataError(
                f"{self._path} is neither LLaVA's format nor COCO captions: found an object with the keys "
                + (", ".join(map(repr, met[:8])) or "none"),
                expected=f"a list of LLaVA records, or COCO captions, like\n{EXAMPLE}",
                fix="convert the file; docs/reference/data-formats.md describes each key",
            )


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)
