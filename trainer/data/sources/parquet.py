"""Parquet with the images' bytes in it, as Hugging Face's data sets are stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.rejects import Reject, RejectCode, RejectedError
from trainer.data.sample import ImageRef, Sample, stable_digest
from trainer.data.sources.file_patterns import Files
from trainer.data.sources.image_files import ImageFiles, open_image_files, require_size
from trainer.data.sources.parts import ManyParts, Part, Records
from trainer.data.sources.records import SHAPES, group_named, identity_of, split_named, turns_of
from trainer.errors import DataError, os_errors

BATCH_ROWS = 32  # rows in memory at once, with their images
IMAGE_COLUMNS = ("images", "image")
READ_COLUMNS = (*IMAGE_COLUMNS, *SHAPES, "answer", "id", "slice", "split")
DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)


class ParquetSource(ManyParts):
    """Rows of one or many files, in the order of their names. An image is a struct {bytes, path}, or plain bytes."""

    def __init__(
        self, files: Files, image_folder: str, caption_question: str, split_by: str, max_image_bytes: int
    ) -> None:
        self._files, self._caption_question, self._split_by = files, caption_question, split_by
        # Rows may name pictures instead of holding them.
        self._images = open_image_files(image_folder, files.storage, max_image_bytes)
        self._names_pictures = bool(image_folder)

    def fingerprint(self) -> str:
        """Covers name, size and checksum (in a folder: time of change) of every file, and of the pictures named."""
        named: Iterator[str] = iter(())
        if self._names_pictures:
            named = (image.name for sample in self if isinstance(sample, Sample) for image in sample.images)
        return f"parquet {self._files.fingerprint()} {self._images.fingerprint(named) if self._names_pictures else ''}"

    def parts(self) -> Sequence[Records]:
        return [Part(partial(self._samples, name)) for name in self._files.names]

    def _samples(self, name: str) -> Iterator[Sample | Reject]:
        with self._files.opened(name) as path:
            for number, row in enumerate(_rows(path, self._files.storage.uri(name), self._split_by), 1):
                where = f"{name} row {number}"
                try:
                    yield self._sample(row, where)
                except RejectedError as error:
                    yield Reject(where, str(row.get("id") or ""), error.code, str(error))

    def _sample(self, row: Mapping[str, Any], where: str) -> Sample:
        found: Any = next((row[name] for name in IMAGE_COLUMNS if row.get(name) is not None), [])
        images = tuple(_image(value, self._images) for value in (found if isinstance(found, list) else [found]))
        turns = turns_of(row, len(images), self._caption_question)
        identity = identity_of(row, "")
        if not identity:
            texts = {name: value for name, value in row.items() if name not in IMAGE_COLUMNS}
            identity = stable_digest(texts, *(image.name for image in images))[:16]
        return Sample(identity, turns, images, where, split_named(row), group_named(row, self._split_by))


def _rows(path: Path, uri: str, split_by: str) -> Iterator[dict[str, Any]]:
    rows = 0
    try:
        with os_errors(f"reading {uri}"):
            size_bytes = path.stat().st_size
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in (*READ_COLUMNS, split_by)]
            if not any(name in SHAPES for name in columns):
                raise DataError(
                    f"{uri} has the columns {', '.join(file.schema_arrow.names[:20])}",
                    expected=f"one of the columns {', '.join(SHAPES)}, and images in a column image or images",
                    fix="rename the columns; docs/how-to/bring-your-own-data.md shows a file",
                )
            for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                yield from batch.to_pylist()
                rows += len(batch)
            promised = file.metadata.num_rows
    except DAMAGE as error:
        raise _damaged(uri, rows, f"{' '.join(str(error).split())[:200]} (the file has {size_bytes} bytes)") from error
    if rows != promised:
        raise _damaged(uri, rows, f"{promised} rows were promised")


def _damaged(uri: str, rows: int, how: str) -> DataError:
    return DataError(
        f"{uri} cannot be read behind row {rows}: {how}",
        expected="a whole Parquet file",
        fix="fetch or write the file again, or leave it out of data.source",
    )


def _image(value: Any, files: ImageFiles) -> ImageRef:
    path = ""
    if isinstance(value, dict):
        path, value = value.get("path") or "", value.get("bytes")
    if value is None and path and isinstance(path, str):
        return files.reference(path)
    if not isinstance(value, bytes):
        raise RejectedError(
            RejectCode.RECORD_FORM, f"an image is a {type(value).__name__}, not bytes or {{bytes, path}}"
        )
    require_size(len(value), files.max_image_bytes)
    # Equal names must mean equal pictures, and a path inside a row need not be the only one of its name.
    sha256 = hashlib.sha256(value).hexdigest()
    return ImageRef(sha256 + PurePosixPath(path).suffix, lambda: value, size_bytes=lambda: len(value))
