"""Counts of equal digests with flat memory, on disk: rows in files by their first bits, so that equal ones meet.

Time grows with the rows: each is written once and read once, in order. A table with a key would be written at random
places, which takes a disk's time as soon as it is larger than the free memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
FILES = 64  # of 100 million rows each has 50 MB
SPOOLED_BYTES = 1 << 16  # of each file, in memory
BUFFERED_ROWS = 1 << 17  # before they are sorted into the files
SUMMED_ROWS = 1 << 20  # of a file, from which its equal rows are summed, so that one frequent digest does not fill it
# Digests as two numbers. `count` is summed over equal digests, and of `first` the smallest is kept.
ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("count", "<u8"), ("first", "<u8")])

Rows = NDArray[np.void]  # of ROW


class DigestFiles:
    """Rows of digests. Its files have no names, so that they end with the process."""

    def __init__(self, *, summed: bool = True) -> None:
        """`summed`: equal digests become one row, and else their rows follow each other in the order of `first`."""
        self._summed = summed
        # In memory until there is much in them: making 64 files takes longer than preparing a small data set.
        self._files = [tempfile.SpooledTemporaryFile(SPOOLED_BYTES, "w+b") for _ in range(FILES)]  # noqa: SIM115
        self._rows, self._sum_from = [0] * FILES, [SUMMED_ROWS] * FILES
        self._buffered: list[Rows] = []
        self._num_buffered = 0

    def add(
        self,
        digests: NDArray[np.uint8],
        *,
        count: NDArray[np.integer] | int = 1,
        first: NDArray[np.integer] | int = 0,
    ) -> None:
        """Add rows. digests: (rows, 16) bytes that are as good as random."""
        rows = np.empty(len(digests), ROW)
        words = np.ascontiguousarray(digests).view(">u8")
        rows["high"], rows["low"], rows["count"], rows["first"] = words[:, 0], words[:, 1], count, first
        self._buffered.append(rows)
        self._num_buffered += len(rows)
        if self._num_buffered >= BUFFERED_ROWS:
            self._flush()

    def __iter__(self) -> Iterator[Rows]:
        """The rows in the order of their digests, some at a time."""
        self._flush()
        for number in range(FILES):
            rows = self._read(number)
            yield _summed(rows) if self._summed else rows[np.lexsort((rows["first"], rows["low"], rows["high"]))]

    def _flush(self) -> None:
        rows = np.concatenate([np.empty(0, ROW), *self._buffered])
        self._buffered, self._num_buffered = [], 0
        places = (rows["high"] // np.uint64((1 << 64) // FILES)).astype(np.int64)
        rows = rows[np.argsort(places, kind="stable")]
        ends = np.cumsum(np.bincount(places, minlength=FILES))
        for number, of_file in enumerate(np.split(rows, ends[:-1])):
            self._files[number].write(of_file.tobytes())
            self._rows[number] += len(of_file)
            if self._summed and self._rows[number] >= self._sum_from[number]:
                self._sum(number)

    def _sum(self, number: int) -> None:
        rows, file = _summed(self._read(number)), self._files[number]
        file.seek(0)
        file.truncate()
        file.write(rows.tobytes())
        self._rows[number] = len(rows)
        self._sum_from[number] = max(SUMMED_ROWS, 2 * len(rows))  # so that summing takes linear time in all

    def _read(self, number: int) -> Rows:
        self._files[number].seek(0)
        return np.frombuffer(self._files[number].read(), ROW)


def digests_of(values: Sequence[bytes]) -> NDArray[np.uint8]:
    """(values, 16) bytes of digests."""
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, DIGEST_BYTES)


def repeat_before(rows: Rows) -> NDArray[np.bool_]:
    """(rows,) whether each has the digest of the row before."""
    found = np.zeros(len(rows), np.bool_)
    found[1:] = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
    return found


def digest_bytes(rows: Rows) -> list[bytes]:
    """The digests of rows."""
    words = np.stack([rows["high"], rows["low"]], axis=1).astype(">u8").tobytes()
    return [words[start : start + DIGEST_BYTES] for start in range(0, len(words), DIGEST_BYTES)]


def _summed(rows: Rows) -> Rows:
    """Sort the rows by digest and sum equal ones."""
    if not len(rows):
        return rows
    rows = rows[np.lexsort((rows["low"], rows["high"]))]
    starts = np.flatnonzero(~repeat_before(rows))
    made = rows[starts]
    made["count"] = np.add.reduceat(rows["count"], starts)
    made["first"] = np.minimum.reduceat(rows["first"], starts)
    return made
