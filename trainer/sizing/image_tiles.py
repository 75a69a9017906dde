"""Tokens around images and tiles in SmolVLM's prompts. Imports no torch."""

from __future__ import annotations

AROUND, SHOWS_ALL = "<fake_token_around_image>", "<global-img>"


def control_tokens(side: int, longest_edge: int | None) -> tuple[str, ...]:
    """The tokens around an image, of the whole image, and of the row and column of each tile that an image may have.

    side: of a tile, in pixels. longest_edge: of an image that is cut, in pixels; None cuts none.
    """
    # An odd edge is made even on one side only, which may add a tile.
    places = range(-(-(longest_edge + longest_edge % 2) // side) if longest_edge else 0)
    return (AROUND, SHOWS_ALL, *(f"<row_{row + 1}_col_{column + 1}>" for row in places for column in places))
