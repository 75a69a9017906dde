"""What PowerSGD sends of a matrix. No torch here: the planner uses it too."""

from __future__ import annotations

MIN_COMPRESSION_RATE = 2  # torch's own


def factors_rank(rows: int, columns: int, rank: int) -> int:
    """Columns of the two factors, rows x rank and columns x rank, that travel for a matrix; 0 where it travels itself.

    It does unless its factors have less than half of its numbers (torch's powerSGD_hook.py, `_should_compress`), which
    no vector's have. A tensor of more axes is a matrix of its first axis and of all others together.
    """
    rank = min(rows, columns, rank)
    return rank if MIN_COMPRESSION_RATE * factors_numbers(rows, columns, rank) < rows * columns else 0


def factors_numbers(rows: int, columns: int, rank: int) -> int:
    """Of both factors together."""
    return (rows + columns) * rank
