"""Token grids of images that keep their aspect ratio. Imports no torch.

The rule of Qwen2-VL (arXiv 2409.12191, 2.1): both sides become multiples of a token's side in pixels, and their product
stays between two bounds. A token covers `merge` x `merge` patches. Tests compare with `smart_resize` and
`get_rope_index` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from vlmpipe.trainer.config.model import MAX_ASPECT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

AXES = 4  # of positions: token of the sample, which separates packed samples, then time, height and width
FRAMES_PER_PATCH = 2  # of a video, which a patch covers in time


class VideoSize(tuple[int, int]):
    """(width, height) in pixels of a video's frames, with its length. Of an image it is a plain tuple."""

    patches: int  # in time, of FRAMES_PER_PATCH frames each
    patch_s: float  # from one patch to the next

    def __new__(cls, width: int, height: int, patches: int, patch_s: float) -> VideoSize:
        size = super().__new__(cls, (width, height))
        size.patches, size.patch_s = patches, patch_s
        return size

    def times_s(self) -> list[float]:
        """The middle of each patch. Frames are evenly spread, so it is the mean of the patch's two frames."""
        return [(number + 0.5) * self.patch_s for number in range(self.patches)]


def patches_in_time(size: tuple[int, int]) -> int:
    """1 of an image."""
    return size.patches if isinstance(size, VideoSize) else 1


@dataclass(frozen=True)
class ImageGrids:
    """How a family cuts images into patches. patch: side in pixels; merge: side of a token in patches."""

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int

    @property
    def max_tokens(self) -> int:
        return max(1, self.max_pixels // (self.patch * self.merge) ** 2)

    def of(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of an image, sizes in pixels. Raises ValueError beyond MAX_ASPECT."""
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise ValueError(f"an image of {width} x {height} pixels is longer than {MAX_ASPECT:g} times its width")
        side = self.patch * self.merge
        rows, columns = round(height / side), round(width / side)
        pixels = rows * columns * side**2
        if pixels > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif pixels < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows * self.merge, columns * self.merge

    def tokens(self, width: int, height: int) -> int:
        """Tokens of an image, sizes in pixels."""
        rows, columns = self.of(width, height)
        return rows * columns // self.merge**2

    def grid(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """Patches in time, rows and columns of patches of an image or a video."""
        return patches_in_time(size), *self.of(*size)

    def positions(
        self, is_image: NDArray[np.bool_], sizes: Sequence[tuple[int, int]], tokens_per_s: float = 0.0
    ) -> NDArray[np.int64]:
        """(AXES, tokens) positions of one sample's tokens.

        is_image: (tokens,). sizes: (width, height) in pixels of each image, in order. Text advances all axes equally.
        An image's tokens share one time; height and width count from there. The next text follows the larger of both.
        tokens_per_s: positions in time of a second of video; 0 where text between a video's patches says their times,
        so that each is placed as an image.
        """
        import numpy as np  # not above: the planner imports this module and needs no positions

        length = len(is_image)
        places = np.empty((AXES, length), np.int64)
        places[0] = np.arange(length)
        image_tokens = np.flatnonzero(is_image)
        used = reached = position = 0  # image tokens done, tokens done, next position
        for size in sizes:
            rows, columns = (patches // self.merge for patches in self.of(*size))
            for times in _times_of_runs(size, tokens_per_s):
                start, tokens = int(image_tokens[used]), len(times) * rows * columns
                places[1:, reached:start] = position + np.arange(start - reached)
                position += start - reached
                used, reached = used + tokens, start + tokens
                places[1, start:reached] = position + np.repeat(times, rows * columns)
                places[2, start:reached] = position + np.tile(np.repeat(np.arange(rows), columns), len(times))
                places[3, start:reached] = position + np.tile(np.arange(columns), len(times) * rows)
                position += max(rows, columns)
        places[1:, reached:] = position + np.arange(length - reached)
        return places

    def as_dict(self) -> dict[str, object]:
        """Everything that decides tokens and positions, as plain JSON."""
        return asdict(self)


def _times_of_runs(size: tuple[int, int], tokens_per_s: float) -> list[NDArray[np.int64]]:
    """For each run of tokens of an image or a video, the positions in time of its patches, from 0."""
    import numpy as np

    if isinstance(size, VideoSize) and tokens_per_s:
        # In fp32 and cut to whole numbers, as `get_rope_index` of Qwen2.5-VL does.
        interval = np.float32(tokens_per_s) * np.float32(size.patch_s)
        return [(np.arange(size.patches, dtype=np.float32) * interval).astype(np.int64)]
    return [np.zeros(1, np.int64)] * patches_in_time(size)


def near_square(tokens: int) -> tuple[int, int]:
    """Rows and columns of the largest image of at most `tokens` tokens that is at most twice as wide as high."""
    widest = math.isqrt(tokens)
    rectangles = [(rows, tokens // rows) for rows in range(widest, 0, -1) if tokens // rows <= 2 * rows]
    return max(rectangles, key=math.prod) if rectangles else (1, tokens)
