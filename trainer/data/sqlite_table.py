"""Temporary SQLite tables for what grows with the data."""

from __future__ import annotations

import hashlib
import sqlite3

CACHE_KIB = 8192


class _ClosedAtTheEnd(sqlite3.Connection):
    """Its owners live as long as one pass over the data and need no end of their own."""

    def __del__(self) -> None:
        self.close()


def disk_table(schema: str) -> sqlite3.Connection:
    """An empty database in the temporary folder, made by `schema`. For one thread at a time.

    It is removed when it is closed, also by the end of the process; a bounded part of it is held in memory.
    """
    # An empty name is a private file: https://www.sqlite.org/inmemorydb.html, "Temporary Databases".
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False, factory=_ClosedAtTheEnd)
    database.executescript(
        f"PRAGMA cache_size = -{CACHE_KIB}; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; "
        f"PRAGMA temp_store = FILE; {schema}; BEGIN"
    )
    return database


def short_digest(*parts: object) -> bytes:
    """16 bytes of SHA-256 over the parts' representations: two of a trillion parts meet with a chance below 1e-14."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).digest()[:16]
