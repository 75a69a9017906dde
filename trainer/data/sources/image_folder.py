"""A folder of images with `metadata.csv`: a column `file_name`, and text, caption, or question and answer."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any, TextIO

from trainer.data.rejects import Reject, RejectCode, RejectedError
from trainer.data.sample import Sample, stable_digest
from trainer.data.sources.file_patterns import Files
from trainer.data.sources.image_files import open_image_files
from trainer.data.sources.parts import OnePart
from trainer.data.sources.records import group_named, identity_of, split_named, text, turns_of
from trainer.errors import DataError, os_errors
from trainer.storage.regular_files import open_regular

METADATA = "metadata.csv"
TEXT_COLUMNS = ("question", "caption", "text")
LONGEST_LINE_CHARS = 64 << 20


class ImageFolderSource(OnePart):
    """One sample a line."""

    def __init__(
        self, files: Files, image_folder: str, caption_question: str, split_by: str, max_image_bytes: int
    ) -> None:
        self._files, self._caption_question = files, caption_question
        self._split_by = split_by
        self._name = files.names[0]
        self._path = files.path(self._name)
        self._images = open_image_files(image_folder, files.storage, max_image_bytes)
        if next(iter(self), None) is None:
            raise DataError(f"{self._path} holds no lines but the header", expected="one line a sample")

    def fingerprint(self) -> str:
        """Covers the file's bytes, and name, size and time of change of every image it refers to."""
        names = (image.name for sample in self if isinstance(sample, Sample) for image in sample.images)
        return f"image-folder {self._files.fingerprint()} {self._images.fingerprint(names)}"

    def __iter__(self) -> Iterator[Sample | Reject]:
        for number, row in self._rows():
            where = f"{self._name} line {number}"
            try:
                yield self._sample(row, where)
            except RejectedError as error:
                yield Reject(where, str(row.get("id") or ""), error.code, str(error))

    def _sample(self, row: dict[Any, Any], where: str) -> Sample:
        if None in row or None in row.values():
            raise RejectedError(RejectCode.RECORD_FORM, "the line has more or fewer fields than the header")
        row = {name: text(value) for name, value in row.items() if value}  # an empty field is none
        if "file_name" not in row:
            raise RejectedError(RejectCode.RECORD_FORM, "nothing under 'file_name'")
        image = self._images.reference(row["file_name"])
        turns = turns_of(row, 1, self._caption_question, TEXT_COLUMNS)
        identity = identity_of(row, stable_digest(sorted(row.items()))[:16])
        return Sample(identity, turns, (image,), where, split_named(row), group_named(row, self._split_by))

    def _lines(self, file: TextIO) -> Iterator[str]:
        """The file's lines, none of which may fill the memory."""
        while line := file.readline(LONGEST_LINE_CHARS + 1):
            if len(line) > LONGEST_LINE_CHARS:
                raise DataError(f"{self._path} has a line of more than {LONGEST_LINE_CHARS:,} characters")
            yield line

    def _rows(self) -> Iterator[tuple[int, dict[Any, Any]]]:
        # Bytes that are not UTF-8 become lone surrogates, which reject their line and not the file.
        with (
            os_errors(f"reading {self._path}"),
            io.TextIOWrapper(open_regular(self._path), "utf-8-sig", "surrogateescape", newline="") as file,
        ):
            reader = csv.DictReader(self._lines(file), strict=True)
            try:
                columns = list(reader.fieldnames or ())
                if "file_name" not in columns or not any(name in columns for name in TEXT_COLUMNS):
                    raise DataError(
                        f"{self._path} has the columns {', '.join(map(repr, columns[:20])) or 'none'}",
                        expected="file_name, and text, caption, or question and answer, in the first line",
                        fix="docs/how-to/bring-your-own-data.md shows a file",
                    )
                for row in reader:
                    yield reader.line_num, row
            except csv.Error as error:
                # An open quote swallows the lines behind it: how many, nobody can say.
                raise DataError(
                    f"{self._path} is not CSV at line {reader.line_num}: {error}",
                    expected='texts with commas, quotes or line ends in "double quotes", and a quote in one doubled',
                ) from error
