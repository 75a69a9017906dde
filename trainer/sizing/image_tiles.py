"""Images that are cut into tiles: their rows and columns, and their text in prompts. Imports no torch.

The rule of Idefics3 (arXiv 2408.12637, 2.2) in SmolVLM's published processors: an image is resized until its longer
side has `longest_edge` pixels, then until both sides are multiples of a tile's, and cut. One more tile shows the whole
image. Tests compare with `SmolVLMImageProcessorPil` and `get_image_prompt_string` of transformers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache

from vlmpipe.trainer.config.model import IMAGE_TOKEN

AROUND, SHOWS_ALL = "<fake_token_around_image>", "<global-img>"
WHOLE = f"{AROUND}{SHOWS_ALL}{IMAGE_TOKEN}{AROUND}"  # an image of one tile, and the last tile of others


@dataclass(frozen=True)
class ImageTiles:
    """How a family cuts images into tiles."""

    side: int  # of a tile, in pixels
    longest_edge: int  # of an image, in pixels: a multiple of `side`, at least twice that
    tokens: int  # of a tile

    @property
    def most(self) -> int:
        """Tiles of a square image."""
        return self._most_in_line**2 + 1

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """The tokens that mark tiles: around an image, the whole image, and each tile's row and column."""
        places = range(self._most_in_line)
        return (AROUND, SHOWS_ALL, *(_place(row, column) for row in places for column in places))

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """First resized size of an image of `width` x `height` pixels.

        Repeats the arithmetic of transformers, division by a ratio included: other rounding would give some images a
        row more or less than the processor cuts.
        """
        ratio = width / height
        if width >= height:
            return self.longest_edge, max(1, _even(int(self.longest_edge / ratio)))
        return max(1, _even(int(self.longest_edge * ratio))), self.longest_edge

    def of(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles of an image of `width` x `height` pixels, without the tile of the whole.

        At least one each, although the processor fails for strips of which its arithmetic leaves no pixel.
        """
        width, height = self.resized(width, height)
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.side)
            return max(1, math.ceil(int(columns * self.side / ratio) / self.side)), columns
        rows = math.ceil(height / self.side)
        return rows, max(1, math.ceil(int(rows * self.side * ratio) / self.side))

    def count(self, width: int, height: int) -> int:
        """Tiles of an image of `width` x `height` pixels, with that of the whole."""
        return math.prod(self.of(width, height)) + 1

    def mark(self, width: int, height: int) -> str:
        """Text of the image in a prompt, with one `<image>` for each tile: row by row, then the whole image."""
        return _mark(*self.of(width, height))

    def as_dict(self) -> dict[str, object]:
        """Everything that decides tokens and text, as plain JSON."""
        return asdict(self)

    @property
    def _most_in_line(self) -> int:
        """The most tiles in a row or column. An odd edge is made even on one side only, which may add a tile."""
        return math.ceil(_even(self.longest_edge) / self.side)


@cache
def _mark(rows: int, columns: int) -> str:
    lines = ("".join(f"{AROUND}{_place(row, column)}{IMAGE_TOKEN}" for column in range(columns)) for row in range(rows))
    return "".join(f"{line}\n" for line in lines) + f"\n{WHOLE}"


def _place(row: int, column: int) -> str:
    return f"<row_{row + 1}_col_{column + 1}>"


def _even(pixels: int) -> int:
    return pixels + pixels % 2
