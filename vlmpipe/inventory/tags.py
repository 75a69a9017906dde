"""Tags of runs: words of a person's own, in the run's folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import damaged_record, read_record_file, write_record

TAGS = "tags.json"  # in a run's folder
_TAG = re.compile(r"[\w][\w.:+-]{0,39}")


def read_tags(folder: Path) -> tuple[str, ...]:
    """The run's tags, sorted. Raises DataError for a damaged record."""
    tags = read_record_file(folder / TAGS).get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise damaged_record(str(folder / TAGS), "its tags are no list of words")
    return tuple(tags)


def change_tags(folder: Path, add: Sequence[str], remove: Sequence[str] = ()) -> tuple[str, ...]:
    """Add and remove tags; returns those the run has then. Raises ConfigError for what cannot be a tag."""
    if wrong := [tag for tag in add if not _TAG.fullmatch(tag)]:
        raise ConfigError(
            f"{wrong[0]!r} cannot be a tag", expected="at most 40 letters, digits and . : + - _, without spaces"
        )
    tags = tuple(sorted({*read_tags(folder), *add} - set(remove)))
    write_record(LocalStorage(folder), TAGS, {"tags": tags})
    return tags
