"""A folder of images with `metadata.csv`: a column `file_name`, and text, caption, or question and answer."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.message_parts import text
from vlmpipe.trainer.data.conversations.records import identity_of
from vlmpipe.trainer.data.rejects import Reject, RejectCode, RejectedError
from vlmpipe.trainer.data.sample import Sample, stable_digest
from vlmpipe.trainer.data.sources.base import FileSource
from vlmpipe.trainer.data.sources.file_patterns import Files
from vlmpipe.trainer.data.text_files.csv_rows import csv_rows
from vlmpipe.trainer.errors import DataError, os_errors
from vlmpipe.trainer.storage.regular_files import open_regular

METADATA, FILE_NAME = "metadata.csv", "file_name"
IMAGE_KEYS = ("image",)  # of data.columns
LONGEST_LINE_CHARS = 64 << 20


Line = dict[str | None, str | list[str] | None]  # with None for what the header does not name


class ImageFolderSource(FileSource[Line, Record]):
    """One sample per line."""

    format = "image-folder"
    shapes = ("question", "caption", "text")

    def __init__(self, files: Files, config: DataConfig) -> None:
        super().__init__(files, config)
        if next(iter(self), None) is None:
            path = files.path(files.names[0])
            raise DataError(f"{path} holds no lines but the header", expected="one line a sample")

    def record_id(self, record: Line) -> str:
        return str(record.get("id") or "")

    def named(self, record: Line) -> Record:
        """The line under the names of `data.columns`, without its empty fields."""
        if None in record or None in record.values():
            raise RejectedError(RejectCode.RECORD_FORM, "the line has more or fewer fields than the header")
        filled = {name: text(value, name) for name, value in record.items() if name is not None and value}
        return Record.of(filled, self.config.columns)

    def sample(self, where: str, record: Record) -> Sample:
        named = [name for name in (FILE_NAME, *IMAGE_KEYS) if record.has(name)]
        if not named:
            raise RejectedError(RejectCode.RECORD_FORM, f"nothing under {FILE_NAME!r}")
        value = record[named[0]]
        image = self.image_files.reference(value[0] if isinstance(value, list) else value)
        return self.build(record, (image,), where, identity_of(record, stable_digest(sorted(record.items()))[:16]))

    def read(self, name: str) -> Iterator[Sample | Reject]:
        path = self.files.path(name)
        # Bytes that are not UTF-8 become lone surrogates, which reject their line and not the file.
        with (
            os_errors(f"reading {path}"),
            io.TextIOWrapper(open_regular(path), "utf-8-sig", "surrogateescape", newline="") as file,
        ):
            reader = csv_rows(_lines(path, file), is_strict=True)
            try:
                columns = list(reader.fieldnames or ())
                mapped = self.config.columns
                known = any(shape in columns for shape in self.shapes) or mapped.answer in columns
                if not ({FILE_NAME, *mapped.image} & set(columns)) or not known:
                    raise DataError(
                        f"{path} has the columns {', '.join(map(repr, columns[:20])) or 'none'}",
                        expected="file_name, and text, caption, or question and answer, in the first line",
                        fix="vlmpipe docs bring-your-own-data shows a file",
                    )
                for row in reader:
                    yield self.checked(f"{name} line {reader.line_num}", row)
            except csv.Error as error:
                # An open quote swallows an unknown number of lines.
                raise DataError(
                    f"{path} is not CSV at line {reader.line_num}: {error}",
                    expected='texts with commas, quotes or line ends in "double quotes", and a quote in one doubled',
                ) from error


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """The file's lines, of bounded length."""
    while line := file.readline(LONGEST_LINE_CHARS + 1):
        if len(line) > LONGEST_LINE_CHARS:
            raise DataError(f"{path} has a line of more than {LONGEST_LINE_CHARS:,} characters")
        yield line
