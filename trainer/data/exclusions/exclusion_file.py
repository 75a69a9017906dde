"""The file that `data.exclude` names: ids of samples, as JSON Lines or CSV, each with why it is left out."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vlmpipe.trainer.data.sample import stable_digest
from vlmpipe.trainer.data.text_files.csv_rows import csv_rows
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.printable import printable
from vlmpipe.trainer.storage import open_storage

MAX_BYTES = 256 << 20  # of the file: some two million ids, which each process that prepares data holds
FIELD = "data.exclude"
SHOWN = 3  # ids in a note


@dataclass(frozen=True)
class Exclusions:
    """Ids of samples that are left out. `address`: of their file; empty without one."""

    address: str = ""
    ids: frozenset[str] = frozenset()

    @property
    def digest(self) -> str:
        """Digest of the ids, whatever their order and their reasons; empty without any."""
        return stable_digest("exclude", *sorted(self.ids)) if self.ids else ""

    def note(self, matched: frozenset[str]) -> str:
        """Describe for people the samples left out, and the number of ids that match none; empty without a file."""
        if not self.address:
            return ""
        missing = sorted(self.ids - matched)
        shown = ", ".join(map(printable, missing[:SHOWN])) + (", ..." if len(missing) > SHOWN else "")
        unmatched = f"; {len(missing):,} match no sample ({shown})" if missing else ""
        return f"data.exclude leaves out {len(matched):,} samples of {len(self.ids):,} ids{unmatched}"


def read_exclusions(address: str) -> Exclusions:
    """The ids in the file at this address, local or in a bucket; none for an empty address.

    Raises ConfigError for a file that is missing, too large or has a line without an id.
    """
    if not address:
        return Exclusions()
    folder, _, name = address.rpartition("/")
    storage = open_storage(folder or ("/" if address.startswith("/") else "."))
    info = storage.stat(name) if name not in ("", ".", "..") else None
    if info is None or info.size_bytes > MAX_BYTES:
        raise ConfigError(
            f"{FIELD} {address!r} is no file, or has more than {MAX_BYTES:,} bytes",
            expected="JSON Lines with a key id, or CSV with a column id",
            fix="correct the address, or leave data.exclude out",
        )
    try:
        text = storage.read(name).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(address, str(error)) from error
    read = _of_csv if name.lower().endswith(".csv") else _of_json_lines
    lines = io.StringIO(text, newline="" if read is _of_csv else "\n")  # not at the other characters of splitlines
    return Exclusions(address, frozenset(read(address, lines)))


def exclusion_lines(rows: Iterable[tuple[str, str, str]]) -> bytes:
    """JSON Lines of (id, reason, detail)."""
    out = io.StringIO()
    for identity, reason, detail in rows:
        out.write(json.dumps({"id": identity, "reason": reason, "detail": detail}, ensure_ascii=False) + "\n")
    return out.getvalue().encode("utf-8", "replace")


def _of_json_lines(address: str, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _unreadable(address, f"line {number} is not JSON: {error}") from error
        yield _identity(address, number, record.get("id") if isinstance(record, dict) else None)


def _of_csv(address: str, lines: Iterable[str]) -> Iterator[str]:
    try:
        for number, row in enumerate(csv_rows(lines, is_strict=True), 2):
            yield _identity(address, number, row.get("id"))
    except csv.Error as error:
        raise _unreadable(address, str(error)) from error


def _identity(address: str, number: int, identity: object) -> str:
    if isinstance(identity, int) and not isinstance(identity, bool):
        return str(identity)
    if not isinstance(identity, str) or not identity:
        raise _unreadable(address, f"line {number} has no id")
    return identity


def _unreadable(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"{FIELD} {address!r}: {why}",
        expected='JSON Lines such as {"id": "digits-17", "reason": "duplicate"}, or CSV with a column id',
        fix="correct the file, or leave data.exclude out",
    )
