"""Rows of comma- and tab-separated files, with one limit of a cell's length for every reader.

The `csv` module keeps its limit for the whole process, and 131,072 characters is less than an image in base64. A reader
that raised it for its own file would decide what the next reader in the process accepts.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable

LONGEST_CELL_CHARS = 256 << 20


def csv_rows(lines: Iterable[str], delimiter: str = ",", *, is_strict: bool = False) -> csv.DictReader[str]:
    """Read rows by the header in the first line.

    is_strict: quotes inside a cell that begins without one are errors. The reader raises csv.Error.
    """
    csv.field_size_limit(min(LONGEST_CELL_CHARS, sys.maxsize))
    return csv.DictReader(lines, delimiter=delimiter, strict=is_strict)
