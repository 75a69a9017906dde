"""COCO captions: one JSON object with the lists `images` and `annotations`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.message_parts import kind_of, text
from vlmpipe.trainer.data.conversations.records import identity_of
from vlmpipe.trainer.data.rejects import Reject, RejectCode, RejectedError
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.sources.base import FileSource
from vlmpipe.trainer.data.sources.file_patterns import Files
from vlmpipe.trainer.data.sqlite_table import disk_table
from vlmpipe.trainer.data.text_files.json_stream import open_json
from vlmpipe.trainer.errors import DataError

EXAMPLE = """{"images": [{"id": 1, "file_name": "cats/1.jpg"}],
 "annotations": [{"id": 7, "image_id": 1, "caption": "A cat on a mat."}]}"""


Annotation = tuple[object, sqlite3.Connection]  # and the file names of images


class CocoSource(FileSource[Annotation, Annotation]):
    """One sample per caption."""

    format = "coco"
    shapes = ("caption",)
    makes_ids = False

    def __init__(self, files: Files, config: DataConfig) -> None:
        super().__init__(files, config)
        if next(iter(self), None) is None:
            path = files.path(files.names[0])
            raise DataError(f"{path} holds no captions", expected=f"COCO captions, like\n{EXAMPLE}")

    def read(self, name: str) -> Iterator[Sample | Reject]:
        file_names = disk_table("CREATE TABLE files (image TEXT PRIMARY KEY, name TEXT) WITHOUT ROWID")
        for record in self._members(name, "images"):
            if isinstance(record, dict) and isinstance(record.get("file_name"), str) and _is_id(record.get("id")):
                file_name = record["file_name"].encode("utf-8", "replace").decode()
                file_names.execute("INSERT OR IGNORE INTO files VALUES (?, ?)", (str(record["id"]), file_name))
        for number, record in enumerate(self._members(name, "annotations"), 1):
            yield self.checked(f"{name} annotation {number}", (record, file_names))

    def record_id(self, record: Annotation) -> str:
        return str(record[0].get("id", "")) if isinstance(record[0], dict) else ""

    def named(self, record: Annotation) -> Annotation:
        return self.renamed(record[0]), record[1]

    def sample(self, where: str, record: Annotation) -> Sample:
        """`record`: an annotation, and the images' file names by id."""
        annotation, file_names = record
        if not isinstance(annotation, Record):
            raise RejectedError(RejectCode.RECORD_FORM, f"an annotation is {kind_of(annotation)}, not an object")
        image_id = annotation.get("image_id")
        if not _is_id(image_id):
            raise RejectedError(
                RejectCode.RECORD_FORM, f"'image_id' must be a text or a whole number, not {image_id!r}"
            )
        image_id = text(str(image_id), "image_id")
        file_name = file_names.execute("SELECT name FROM files WHERE image = ?", (image_id,)).fetchone()
        if file_name is None:
            raise RejectedError(RejectCode.REF_MISSING, f"no image with the id {image_id!r} in the file")
        image = self.image_files.reference(file_name[0])
        return self.build(annotation, (image,), where, identity_of(annotation, f"coco-{where.rpartition(' ')[2]}"))

    def _members(self, name: str, member: str) -> Iterator[object]:
        """The items of one of the object's lists."""
        path, keys = self.files.path(name), []
        with open_json(path, f"COCO captions, like\n{EXAMPLE}") as reader:
            for key in reader.keys():  # noqa: SIM118 (a reader is not a dictionary)
                keys.append(key)
                if key == member and reader.peek() == "[":
                    yield from reader.items()
                else:
                    reader.skip()
            if reader.peek() == "{":
                raise DataError(
                    f"{path} holds several JSON objects", fix="if each line is a record, name the file .jsonl"
                )
            reader.end()
        if member not in keys:
            raise DataError(
                f"{path} is neither LLaVA's format nor COCO captions: found an object with the keys "
                + (", ".join(map(repr, keys[:8])) or "none"),
                expected=f"a list of LLaVA records, or COCO captions, like\n{EXAMPLE}",
                fix="convert the file; vlmpipe docs data-formats describes each key",
            )


def _is_id(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)
