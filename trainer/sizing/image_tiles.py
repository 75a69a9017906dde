"""Images that are cut into tiles: how many rows and columns of them an image has, and the text around them. No torch.

The rule is that of Idefics3 (arXiv 2408.12637, 2.2) as the published processors of SmolVLM have it: an image is resized
until its longer side has `longest_edge` pixels, then until both sides are multiples of a tile's, and cut. One more tile
shows the whole image. transformers has the rule in `SmolVLMImageProcessorPil` and the text in
`get_image_prompt_string`; what is counted and written here must be what they give, and tests compare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from trainer.config.model import IMAGE_TOKEN

AROUND, SHOWS_ALL = "<fake_token_around_image>", "<global-img>"
WHOLE = f"{AROUND}{SHOWS_ALL}{IMAGE_TOKEN}{AROUND}"  # an image that is one tile, and the last tile of one that is cut


@dataclass(frozen=True)
class ImageTiles:
    """How a family's images are cut into tiles."""

    side: int  # of a tile, in pixels
    longest_edge: int  # of an image, in pixels: a multiple of `side`, and more than that
    tokens: int  # of a tile

    @property
    def most(self) -> int:
        """Tiles of an image that is as high as wide."""
        return self._most_in_line**2 + 1

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Those of marks, with all places that a tile can have."""
        places = range(self._most_in_line)
        return (AROUND, SHOWS_ALL, *(_place(row, column) for row in places for column in places))

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """What an image of `width` x `height` pixels is resized to before it is made a multiple of a tile.

        In the very arithmetic of transformers, which divides by a ratio where it could multiply: rounded otherwise, an
        image on an edge would have a row more or less than the processor cuts.
        """
        ratio = width / height
        if width >= height:
            return self.longest_edge, max(1, _even(int(self.longest_edge / ratio)))
        return max(1, _even(int(self.longest_edge * ratio))), self.longest_edge

    def of(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles of an image of `width` x `height` pixels, without the tile that shows the whole.

        A strip has one tile across, also where the processor's arithmetic leaves it no pixel and it fails.
        """
        width, height = self.resized(width, height)
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.side)
            return max(1, math.ceil(int(columns * self.side / ratio) / self.side)), columns
        rows = math.ceil(height / self.side)
        return rows, max(1, math.ceil(int(rows * self.side * ratio) / self.side))

    def count(self, width: int, height: int) -> int:
        """Tiles of an image of `width` x `height` pixels, with the one that shows the whole."""
        return math.prod(self.of(width, height)) + 1

    def mark(self, width: int, height: int) -> str:
        """Text that stands for the image, with one `<image>` a tile: row after row, then the whole image."""
        return _mark(*self.of(width, height))

    def as_dict(self) -> dict[str, Any]:
        """All that decides tokens and text, as plain JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def _most_in_line(self) -> int:
        """Of a square image. An odd edge is made even on one side only, which may take a tile more."""
        return math.ceil(_even(self.longest_edge) / self.side)


@cache
def _mark(rows: int, columns: int) -> str:
    lines = ("".join(f"{AROUND}{_place(row, column)}{IMAGE_TOKEN}" for column in range(columns)) for row in range(rows))
    return "".join(f"{line}\n" for line in lines) + f"\n{WHOLE}"


def _place(row: int, column: int) -> str:
    return f"<row_{row + 1}_col_{column + 1}>"


def _even(pixels: int) -> int:
    return pixels + pixels % 2
