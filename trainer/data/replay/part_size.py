"""How many questions a file of questions for the start model has: small enough that few of them occupy all ranks."""

from __future__ import annotations

import math

MIN_ROWS, MAX_ROWS = 64, 256
FILES = 512  # that are written before files have more than MIN_ROWS


def part_rows(written: int) -> int:
    """Questions of the next file after `written` ones: more where there are many, so that files stay few."""
    return min(MAX_ROWS, max(MIN_ROWS, written // FILES))


def busiest_rank(questions: int, ranks: int) -> int:
    """Questions of the rank that has the most: ranks take whole files. An upper bound where files differ in size."""
    rows = part_rows(questions)
    if rows == MIN_ROWS:
        return min(questions, math.ceil(questions / (rows * ranks)) * rows)
    return min(questions, math.ceil(questions / ranks) + rows)
