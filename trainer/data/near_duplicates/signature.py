"""Signatures of images, by which copies that were encoded, resized or brightened again are found.

Half of a signature is a perceptual hash of brightness, half the colours of a coarse grid. It does not see copies that
were cropped by more than some pixels, mirrored or turned.

Source of the hash and of its distance: Facebook 2019, The TMK+PDQF video-hashing algorithm and the PDQ image-hashing
algorithm (256 signs of low frequencies against their median, 31 bits). The colours are our own: hashes alone take
drawings that differ in colour for the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 64  # pixels that an image is resized to
MIN_COPY_SIDE = 80  # pixels of a smaller copy, which a decoder may make in place of the image
SCALE = 1 << 12
FREQUENCIES = 16  # of the cosine transform, in each direction
CELLS = 4  # of the grid of colours, in each direction
HASH_BYTES = FREQUENCIES * FREQUENCIES // 8
SIGNATURE_BYTES = HASH_BYTES + 2 * CELLS * CELLS
MAX_HASH_DISTANCE = 31  # bits
MAX_COLOUR_DISTANCE = 4.0  # mean difference of Cb and Cr, of 255
MIN_DEVIATION = 1  # of brightness, of 255: below it a hash is noise

Box = tuple[float, float, float, float]  # left, top, right and bottom in pixels
Signatures = NDArray[np.uint8]  # (images, SIGNATURE_BYTES)


def _cosines() -> NDArray[np.float64]:
    """(FREQUENCIES, SIDE) rows 1 to FREQUENCIES of the discrete cosine transform, times SCALE; row 0, the mean, is left
    out. Whole numbers.
    """
    frequencies, places = np.arange(1, FREQUENCIES + 1)[:, None], np.arange(SIDE)[None]
    return np.rint(SCALE * np.cos(np.pi * frequencies * (2 * places + 1) / (2 * SIDE)))


_COSINES = _cosines()


def image_signature(image: Image.Image, box: Box | None = None) -> bytes:
    """SIGNATURE_BYTES of an image in mode L or RGB; none of one without structure, such as an empty page.

    box: what is the image's of a small copy that a decoder made; None: all of it.

    All numbers are whole, so that a signature does not depend on the machine: as floats they are exact up to 2**53, of
    which these sums reach a hundredth, and are multiplied six times faster than as integers.
    """
    small = image.resize((SIDE, SIDE), Image.Resampling.BOX, box)
    small = (small if small.mode == "RGB" else small.convert("RGB")).convert("YCbCr")
    brightness = np.asarray(small.getchannel(0), np.float64)
    total, count = brightness.sum(), SIDE * SIDE
    if count * (brightness.ravel() @ brightness.ravel()) - total * total < (count * MIN_DEVIATION) ** 2:
        return b""
    waves = _COSINES @ brightness @ _COSINES.T
    colours = np.asarray(small.reduce(SIDE // CELLS))[..., 1:]
    middle = np.partition(waves.ravel(), [waves.size // 2 - 1, waves.size // 2])[waves.size // 2 - 1 :][:2]
    return np.packbits(2 * waves > middle.sum()).tobytes() + colours.tobytes()


def hash_distance(first: Signatures, other: Signatures) -> NDArray[np.int64]:
    """(pairs,) bits in which two hashes differ."""
    words = [np.ascontiguousarray(side[:, :HASH_BYTES]).view(np.uint64) for side in (first, other)]
    return np.bitwise_count(words[0] ^ words[1]).sum(axis=1, dtype=np.int64)


def colour_distance(first: Signatures, other: Signatures) -> NDArray[np.float64]:
    """(pairs,) mean difference of colours, of 255."""
    colours = [side[:, HASH_BYTES:].astype(np.int16) for side in (first, other)]
    return np.abs(colours[0] - colours[1]).mean(axis=1)
