"""Sizes of what PowerSGD sends for a matrix. Imports no torch: the planner uses it too."""

from __future__ import annotations

MIN_COMPRESSION_RATE = 2  # torch's default


def factors_rank(rows: int, columns: int, rank: int) -> int:
    """Rank of the two factors, rows x rank and columns x rank, that are sent for a matrix; 0 if it is sent itself.

    Factors are sent if they have less than half of its numbers (torch's powerSGD_hook.py, `_should_compress`); those of
    a vector never have. A tensor with more axes is a matrix with all but the first axis joined.
    """
    rank = min(rows, columns, rank)
    return rank if MIN_COMPRESSION_RATE * factors_numbers(rows, columns, rank) < rows * columns else 0


def factors_numbers(rows: int, columns: int, rank: int) -> int:
    """Numbers in both factors."""
    return (rows + columns) * rank
