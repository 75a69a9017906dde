"""Check whether data here names videos or pages of documents, by names of files and the first megabyte of texts."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.trainer.data.media import PDF
from vlmpipe.trainer.data.video import VIDEOS
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage.regular_files import open_regular

if TYPE_CHECKING:
    from collections.abc import Set

    from vlmpipe.trainer.config.data import DataConfig

TEXTS = frozenset({".json", ".jsonl", ".csv", ".tsv"})
TEXT_BYTES = 1 << 20
MAX_FILES = 10_000  # that are looked at
# Where a value ends or a fragment begins, not within a sentence.
VIDEO = re.compile(f'({"|".join(map(re.escape, sorted(VIDEOS)))})([#"]|,[^ ]|[\t\r\n]|$)', re.IGNORECASE)
PAGE = re.compile(f"{re.escape(PDF)}#page=", re.IGNORECASE)


def names_videos(data: DataConfig) -> bool:
    """Return whether the data names videos. What records in buckets and in Parquet name is known only once they are
    read.
    """
    return data.video == "native" or _names(data, VIDEO, VIDEOS)


def names_documents(data: DataConfig) -> bool:
    """Return whether records name pages of documents. A document beside the images does not count: it is not opened."""
    return _names(data, PAGE, frozenset())


def _names(data: DataConfig, in_text: re.Pattern[str], suffixes: Set[str]) -> bool:
    for path in itertools.islice(_files(data), MAX_FILES):
        suffix = path.suffix.lower()
        if suffix in suffixes or (suffix in TEXTS and in_text.search(_beginning(path))):
            return True
    return False


def _files(data: DataConfig) -> Iterator[Path]:
    for address in data.addresses().values():
        place = Path(address)
        if "://" in address or not place.exists():
            continue
        if place.is_file():
            yield place
        for folder, _, names in os.walk(place):
            yield from (Path(folder, name) for name in names)


def _beginning(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return file.read(TEXT_BYTES).decode("utf-8", "ignore")
    except (OSError, DataError):  # which reading the source reports
        return ""
