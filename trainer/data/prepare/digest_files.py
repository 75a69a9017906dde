"""Counts of equal digests with flat memory, on disk: rows in files by their first bits, so that equal ones meet.

Time grows with the rows: each is written and read in order, once, and again where its file is too large for memory and
is divided by further bits. A table with a key would be written at random places, which takes a disk's time as soon as
it is larger than the free memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
FILE_BITS = 6  # of a digest, which name one of 64 files
MAX_SHARED_BITS = 64 - FILE_BITS  # a file whose digests begin with more equal bits is not divided
SPOOLED_BYTES = 1 << 16  # of each file, in memory
BUFFERED_ROWS = 1 << 16  # in memory: before they are sorted into the files, and of a file that is read
# Digests as two numbers. `count` is summed over equal digests, and of `first` the smallest is kept.
ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("count", "<u8"), ("first", "<u8")])

Rows = NDArray[np.void]  # of ROW


class DigestFiles:
    """Rows of digests. Its files have no names, so that they end with the process."""

    def __init__(self, *, summed: bool = True, bits: int = FILE_BITS, shared_bits: int = 0) -> None:
        """`summed`: equal digests become one row, and else their rows follow each other in the order of `first`.

        `bits` name the file of a digest, after the `shared_bits` first ones.
        """
        self._summed, self._bits, self._shared_bits = summed, bits, shared_bits
        # In memory until there is much in them: making 64 files takes longer than preparing a small data set.
        self._files = [tempfile.SpooledTemporaryFile(SPOOLED_BYTES, "w+b") for _ in range(1 << bits)]  # noqa: SIM115
        self._rows = [0] * len(self._files)
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
        self._add_rows(rows)

    def __iter__(self) -> Iterator[Rows]:
        """The rows in the order of their digests, some at a time."""
        self._flush()
        for file, num_rows in zip(self._files, self._rows, strict=True):
            file.seek(0)
            if num_rows > BUFFERED_ROWS and self._shared_bits + self._bits <= MAX_SHARED_BITS:
                yield from self._divided(file, num_rows)
            else:
                rows = np.frombuffer(file.read(), ROW)
                yield _summed(rows) if self._summed else rows[np.lexsort((rows["first"], rows["low"], rows["high"]))]

    def _divided(self, file: IO[bytes], num_rows: int) -> Iterator[Rows]:
        """The rows of a file that is too large for memory."""
        bits = min(FILE_BITS, (2 * num_rows // BUFFERED_ROWS).bit_length())  # files of a quarter to half of that
        finer = DigestFiles(summed=self._summed, bits=bits, shared_bits=self._shared_bits + self._bits)
        is_repeated = self._summed and self._shared_bits > 0  # a frequent digest: dividing did not make its file small
        while data := file.read(BUFFERED_ROWS * ROW.itemsize):
            rows = np.frombuffer(data, ROW)
            finer._add_rows(_summed(rows) if is_repeated else rows)
        yield from finer

    def _add_rows(self, rows: Rows) -> None:
        self._buffered.append(rows)
        self._num_buffered += len(rows)
        if self._num_buffered >= BUFFERED_ROWS:
            self._flush()

    def _flush(self) -> None:
        rows = np.concatenate([np.empty(0, ROW), *self._buffered])
        self._buffered, self._num_buffered = [], 0
        places = ((rows["high"] << np.uint64(self._shared_bits)) >> np.uint64(64 - self._bits)).astype(np.int64)
        rows = rows[np.argsort(places, kind="stable")]
        ends = np.cumsum(np.bincount(places, minlength=len(self._files)))
        for number, of_file in enumerate(np.split(rows, ends[:-1])):
            self._files[number].write(of_file.tobytes())
            self._rows[number] += len(of_file)


def digests_of(values: Sequence[bytes]) -> NDArray[np.uint8]:
    """(values, 16) bytes of digests."""
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, DIGEST_BYTES)


def repeat_before(rows: Rows) -> NDArray[np.bool_]:
    """(rows,) whether each has the digest of the row before."""
    repeated = np.zeros(len(rows), np.bool_)
    repeated[1:] = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
    return repeated


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
