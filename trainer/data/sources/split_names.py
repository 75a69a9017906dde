"""The splits that names of files and folders state, and the files of saved data sets that are data."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from vlmpipe.trainer.data.sample import SPLIT_NAMES, Split
from vlmpipe.trainer.data.sources.file_patterns import Files
from vlmpipe.trainer.errors import DataError, os_errors
from vlmpipe.trainer.storage.regular_files import read_regular

BETWEEN_WORDS = re.compile(r"[-_.\s]+")
STATE = "state.json"  # of Hugging Face's save_to_disk: names the set's files
STATE_BYTES = 16 << 20
CACHE = re.compile(r"cache-.*\.arrow")  # that Hugging Face's datasets.map leaves beside a set's files


def split_in(name: str) -> Split | None:
    """The split that a file's name states, such as `data/train-00000-of-00002.parquet`, or the nearest folder's.

    A number may follow the word, as in `val2014`. Words of two splits in one name state nothing.
    """
    path = PurePosixPath(name)
    splits = {SPLIT_NAMES.get(word.rstrip("0123456789")) for word in BETWEEN_WORDS.split(path.stem.lower())} - {None}
    if len(splits) == 1:
        return splits.pop()
    folders = (SPLIT_NAMES.get(part.lower().rstrip("0123456789")) for part in reversed(path.parent.parts))
    return next((split for split in folders if split), None)


def stated_splits(names: Sequence[str]) -> dict[str, Split]:
    """The split of each file that states one, if they state more than that all are for training; a single file states
    nothing, since the run file names it.
    """
    splits = {name: split for name in names if (split := split_in(name))}
    return splits if len(names) > 1 and "eval" in splits.values() else {}


def without_caches(files: Files) -> tuple[Files, tuple[str, ...]]:
    """The Arrow files that are data, and the names of the others: those that a set's state does not name, and caches.

    Raises DataError where the state names a file that is missing.
    """
    folders: dict[str, list[str]] = {}
    for name in files.names:
        folders.setdefault(str(PurePosixPath(name).parent), []).append(name)
    used: set[str] = set()
    for folder, names in folders.items():
        arrows = [name for name in names if name.endswith(".arrow")]
        state = str(PurePosixPath(folder) / STATE)
        if state in names:
            used.update(_named(files, state, arrows))
        else:
            data = [name for name in arrows if not CACHE.fullmatch(PurePosixPath(name).name)]
            used.update(data or arrows)
    left_out = tuple(name for name in files.names if name.endswith(".arrow") and name not in used)
    return replace(files, infos=tuple(info for info in files.infos if info.name in used)), left_out


def _named(files: Files, state: str, arrows: Sequence[str]) -> set[str]:
    path = files.path(state)
    with os_errors(f"reading {path}"):
        content: object = json.loads(read_regular(path, STATE_BYTES))
    listed = content.get("_data_files") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        return set(arrows)
    folder = PurePosixPath(state).parent
    names = {str(folder / str(listing.get("filename"))) for listing in listed if isinstance(listing, dict)}
    if missing := sorted(names - set(arrows)):
        raise DataError(
            f"{path} names {missing[0]}, which is missing",
            expected="every file of the saved data set",
            fix="save or fetch the data set again",
        )
    return names
