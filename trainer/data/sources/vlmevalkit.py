"""VLMEvalKit's tables: tab-separated rows of a question, its options, an answer and an image in base64."""

from __future__ import annotations

import csv
import hashlib
import io
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.message_parts import from_base64, text
from vlmpipe.trainer.data.conversations.records import identity_of
from vlmpipe.trainer.data.rejects import Reject, RejectCode, RejectedError
from vlmpipe.trainer.data.sample import ImageRef, Sample
from vlmpipe.trainer.data.sources.base import FileSource
from vlmpipe.trainer.data.sources.file_patterns import Files
from vlmpipe.trainer.data.sources.image_files import require_size
from vlmpipe.trainer.data.sqlite_table import disk_table
from vlmpipe.trainer.data.text_files.csv_rows import csv_rows
from vlmpipe.trainer.errors import DataError, os_errors
from vlmpipe.trainer.storage.regular_files import open_regular

SUFFIX = ".tsv"
LONGEST_INDEX_CHARS = 64  # an image of fewer characters is the index of the row that has it
PATHS = ("image_path",)  # of images on the machine of those who made the table


@dataclass(frozen=True)
class _Row:
    """The cells of a row by their columns, None for what the header does not name; images of the rows before it."""

    cells: Mapping[str | None, str | list[str] | None]
    images: sqlite3.Connection


class VlmEvalKitSource(FileSource[_Row, Record]):
    """One sample a row. Source: https://github.com/open-compass/VLMEvalKit/blob/main/docs/en/Development.md."""

    format = "vlmevalkit"
    shapes = ("question",)
    names_images = False

    def __init__(self, files: Files, config: DataConfig) -> None:
        super().__init__(files, config)
        if next(iter(self), None) is None:
            raise DataError(f"{files.source} holds no rows but the header", expected="one row a sample")

    def fingerprint(self) -> str:
        """Covers name, size and checksum (in a folder: times) of every table."""
        return f"{self.format} {self.files.fingerprint()}"

    def read(self, name: str) -> Iterator[Sample | Reject]:
        path = self.files.path(name)
        images = disk_table("CREATE TABLE images (row TEXT PRIMARY KEY, image TEXT) WITHOUT ROWID")
        with (
            os_errors(f"reading {path}"),
            io.TextIOWrapper(open_regular(path), "utf-8-sig", "surrogateescape", newline="") as file,
        ):
            reader = csv_rows(file, "\t", is_strict=True)
            try:
                columns = list(reader.fieldnames or ())
                if not {"image", "question"} <= {*columns, *self._named(columns)}:
                    raise DataError(
                        f"{path} has the columns {', '.join(map(repr, columns[:20])) or 'none'}",
                        expected="index, image in base64, question, answer, and options under A, B, ...",
                    )
                for number, row in enumerate(reader, 1):
                    yield self.checked(f"{name} row {number}", _Row(row, images))
            except csv.Error as error:
                raise DataError(
                    f"{path} is not a table at line {reader.line_num}: {error}",
                    expected='cells between tabs, with line ends only in "double quotes"',
                ) from error

    def _named(self, columns: list[str]) -> list[str]:
        mapped = {"question": [self.config.columns.question], "image": list(self.config.columns.image)}
        return [name for name, keys in mapped.items() if set(keys) & set(columns)]

    def record_id(self, record: _Row) -> str:
        return str(record.cells.get("id", ""))

    def named(self, record: _Row) -> Record:
        """The row under the names of `data.columns`, without its empty cells."""
        cells, images = record.cells, record.images
        if None in cells or None in cells.values():
            raise RejectedError(RejectCode.RECORD_FORM, "the row has more or fewer cells than the header")
        filled = {name: text(value, name) for name, value in cells.items() if name is not None and value}
        row = Record.of(filled, self.config.columns)
        encoded = row.get("image")
        encoded = encoded[0] if isinstance(encoded, list) and encoded else encoded
        if isinstance(encoded, str) and len(encoded) <= LONGEST_INDEX_CHARS:
            image = images.execute("SELECT image FROM images WHERE row = ?", (encoded,)).fetchone()
            if image is None:
                raise RejectedError(RejectCode.REF_MISSING, f"no row before has the image {encoded!r}")
            encoded = image[0]
        elif encoded and row.has("index"):
            images.execute("INSERT OR IGNORE INTO images VALUES (?, ?)", (row.peek("index"), encoded))
        return row.holding(image=encoded)

    def sample(self, where: str, record: Record) -> Sample:
        record.took("index", *PATHS)
        images = (self._image(record["image"]),) if record.has("image") else ()
        made = record.holding(id=record.peek("id") or record.peek("index"))
        return self.build(made, images, where, identity_of(made))

    def _image(self, encoded: str) -> ImageRef:
        data = from_base64(encoded, self.config.max_image_bytes, "'image'")
        require_size(len(data), self.config.max_image_bytes)
        return ImageRef(hashlib.sha256(data).hexdigest(), lambda: data, size_bytes=lambda: len(data))
