"""Difference between a prepared data set and the one before it, from the two indexes."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.sample import SPLITS
from vlmpipe.trainer.data.shards.index_file import NAME, read_columns
from vlmpipe.trainer.data.shards.prepared_files import DONE, open_prepared
from vlmpipe.trainer.data.shards.tar import key_of
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.records import read_record, write_record

LATEST = "latest"  # folder under `<root>/chunks` with the fingerprint last prepared, by the run file's name
BATCH_LINES = 4096


@dataclass(frozen=True)
class Changes:
    """Samples by id: `same + changed + gone` in the earlier set, `same + changed + new` in this one."""

    before: str  # fingerprint of the earlier set
    new: int = 0
    changed: int = 0  # other images or another text under the same id
    gone: int = 0
    same: int = 0
    moved: int = 0  # to the other split, among `same` and `changed`

    def sentence(self) -> str:
        parts = [f"{count} {name}" for name, count in asdict(self).items() if name != "before" and count]
        return f"against {self.before[:8]}: {', '.join(parts)}"


def changes_since_last(config: JobConfig, fingerprint: str) -> Changes | None:
    """Compare with the set last prepared under this name and root, and record this one as the last.

    None when there is no earlier set, or it was deleted. Raises OtherFormatError where it is of an earlier format.
    """
    notes, name = open_storage(config.run.chunks_root), f"{LATEST}/{key_of(config.name)}.json"
    before = read_record(notes, name)["fingerprint"] if notes.stat(name) else ""
    if before != fingerprint:
        write_record(notes, name, {"fingerprint": fingerprint})
    if not before or open_storage(join_uri(config.run.prepared_root, before)).stat(DONE) is None:
        return None
    return compare(config.run.prepared_root, before, fingerprint)


def compare(prepared_root: str, before: str, now: str) -> Changes:
    """The changes from one prepared set to another, by their fingerprints, in bounded memory."""
    counts = dict.fromkeys(("new", "changed", "gone", "same", "moved"), 0)
    streams = [_lines(prepared_root, fingerprint, split) for fingerprint in (before, now) for split in SPLITS]
    lines = heapq.merge(*streams, key=lambda line: line["id"])  # of equal ids the one from before comes first
    for _, group in groupby(lines, key=lambda line: line["id"]):
        first, *others = group
        if not others:
            counts["gone" if first["set"] == before else "new"] += 1
            continue
        (second,) = others
        counts["same" if first["content"] == second["content"] else "changed"] += 1
        counts["moved"] += first["split"] != second["split"]
    return Changes(before, **counts)


def _lines(prepared_root: str, fingerprint: str, split: str) -> Iterator[dict[str, Any]]:
    """A split's samples, sorted by id; `set` is the fingerprint."""
    path = open_prepared(join_uri(prepared_root, fingerprint)).fetch(NAME)
    for of_split, lines in read_columns(path, ["id", "content"]):
        if of_split == split:
            for batch in range(0, len(lines), BATCH_LINES):
                of_lines = {"split": split, "set": fingerprint}
                yield from (line | of_lines for line in lines.slice(batch, BATCH_LINES).to_pylist())
