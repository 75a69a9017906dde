"""Temporary SQLite tables for data that may not fit in memory."""

from __future__ import annotations

import hashlib
import sqlite3

CACHE_KIB = 8192


class _ClosedAtTheEnd(sqlite3.Connection):
    """Closes with its owner, which lives as long as one pass over the data."""

    def __del__(self) -> None:
        self.close()


def disk_table(schema: str) -> sqlite3.Connection:
    """A temporary database with this schema, deleted when it is closed. For one thread at a time.

    A bounded part of it is held in memory.
    """
    # An empty name is a private file: https://www.sqlite.org/inmemorydb.html, "Temporary Databases".
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False, factory=_ClosedAtTheEnd)
    database.executescript(
        f"PRAGMA cache_size = -{CACHE_KIB}; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; "
        f"PRAGMA temp_store = FILE; {schema}; BEGIN"
    )
    return database


def short_digest(*parts: object) -> bytes:
    """16 bytes of SHA-256 over the parts' representations: a trillion of them collide with probability below 1e-14."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).digest()[:16]
