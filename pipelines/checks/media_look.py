"""Whether data on this machine names videos or documents, by the names of files and the first megabyte of texts."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.trainer.data.media import PDF
from vlmpipe.trainer.data.video import VIDEOS

if TYPE_CHECKING:
    from collections.abc import Set

    from vlmpipe.trainer.config.data import DataConfig

TEXTS = frozenset({".json", ".jsonl", ".csv", ".tsv"})
TEXT_BYTES = 1 << 20
MOST_FILES = 10_000


def names_videos(data: DataConfig) -> bool:
    """Of records in buckets and in Parquet, more is known once they are read."""
    return data.video == "native" or _names(data, VIDEOS)


def names_documents(data: DataConfig) -> bool:
    return _names(data, frozenset({PDF}))


def _names(data: DataConfig, suffixes: Set[str]) -> bool:
    in_text = re.compile(f"({'|'.join(map(re.escape, sorted(suffixes)))})\\b", re.IGNORECASE)
    for path in itertools.islice(_files(data), MOST_FILES):
        if path.suffix.lower() in suffixes:
            return True
        if path.suffix.lower() in TEXTS and in_text.search(_beginning(path)):
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
        with path.open("rb") as file:
            return file.read(TEXT_BYTES).decode("utf-8", "ignore")
    except OSError:  # which reading the source reports
        return ""
