"""The scans of handwritten digits that scikit-learn holds as a file."""

from __future__ import annotations

import gzip
from dataclasses import dataclass

import numpy as np

from vlmpipe.trainer.data.sources.builtin import installed_file

FILE = "datasets/data/digits.csv.gz"  # a line for each scan: 64 grey levels, then the digit
SCAN_MAX = 16  # grey levels are 0 to 16


@dataclass(frozen=True)
class DigitScans:
    """Grey levels (scans, 8, 8) and the digit of each scan."""

    images: np.ndarray
    labels: list[int]


def read_digit_scans() -> DigitScans:
    """Read what `sklearn.datasets.load_digits` reads, without sklearn: its import takes most of the time of a small
    preparation. Raises UserError (exit 69) when scikit-learn is not installed.
    """
    with gzip.open(installed_file("sklearn", "scikit-learn", FILE), "rt", encoding="utf-8") as lines:
        table = np.loadtxt(lines, delimiter=",")
    return DigitScans(table[:, :-1].reshape(-1, 8, 8), [int(label) for label in table[:, -1]])
