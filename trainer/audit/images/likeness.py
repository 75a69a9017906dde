"""Likeness of two images in their pixels, whatever their encoding, size, brightness or a cropped margin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 32  # pixels that an image is compared at
MARGINS = (0.0, 0.015, 0.03, 0.045)  # cropped from each side of one of the two
MIN_CORRELATION = 0.99
MAX_COLOURS = 6.0  # mean difference of Cb and Cr on a grid of 4 x 4, of 255
MIN_DEVIATION = 1.0  # of brightness, of 255: a blank image is like no other

Pixels = NDArray[np.float32]


@dataclass(frozen=True)
class Look:
    """An image at each of MARGINS: (margins, SIDE * SIDE) standardised brightness, and (32,) colours of a grid."""

    brightness: Pixels
    colours: Pixels
    is_blank: bool


def look_of(image: Image.Image) -> Look:
    """The look of an image in any mode."""
    small = image if image.mode == "RGB" else image.convert("RGB")
    views, is_blank = [], False
    for margin in MARGINS:
        across, down = margin * small.width, margin * small.height
        box = (across, down, small.width - across, small.height - down)
        view = small.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box).convert("L")
        values = np.asarray(view, np.float32).ravel()
        deviation = float(values.std())
        is_blank = is_blank or (margin == 0 and deviation < MIN_DEVIATION)
        views.append((values - values.mean()) / max(deviation, MIN_DEVIATION))
    colours = np.asarray(small.resize((4, 4), Image.Resampling.BOX).convert("YCbCr"), np.float32)[..., 1:].ravel()
    return Look(np.stack(views), colours, is_blank)


def correlation(first: Look, second: Look) -> float:
    """Highest correlation of brightness with no margin of one, and any margin of the other, cropped."""
    if first.is_blank or second.is_blank:
        return 0.0
    forward = first.brightness[:1] @ second.brightness.T
    backward = second.brightness[:1] @ first.brightness.T
    return float(max(forward.max(), backward.max())) / (SIDE * SIDE)


def are_alike(first: Look, second: Look) -> bool:
    """Return whether two images are one, encoded, resized, brightened or cropped again."""
    if float(np.abs(first.colours - second.colours).mean()) > MAX_COLOURS:
        return False
    return correlation(first, second) >= MIN_CORRELATION
