"""Decoded images, the memory of their values, and tables of what an image processor makes of each value of a pixel."""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import weakref
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vlmpipe.trainer.sizing.image_preparation import FREE_BLOCKS

if TYPE_CHECKING:
    from transformers import BaseImageProcessor


def opened(data: bytes) -> Image.Image:
    """An image whose header is read. Prepared data holds complete, upright JPEG, PNG and WebP images with 8 bits a
    channel.
    """
    return Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP"))


def decoded(data: bytes) -> Image.Image:
    """The image in RGB."""
    image = opened(data)
    if image.mode != "RGB":
        return image.convert("RGB")
    image.load()  # `convert` would copy it
    return image


class ValueMemory:
    """Memory for pixel values in fp32, which arrays take one after the other.

    New memory is filled with zeros by the kernel, page by page, when it is first written: for an image of a megapixel
    that takes as long as all else, and longer on virtual machines. Of large arrays that are gone, C's allocator gives
    all memory back.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def empty(self, *shape: int) -> np.ndarray:
        """An array without values. Its memory is another's once the array, its views and its tensors are gone."""
        count = math.prod(shape)
        if not count:
            return np.empty(shape, np.float32)
        block = self._block(count * np.dtype(np.float32).itemsize)
        flat = np.frombuffer(block, np.float32, count)  # every view holds on to it, as it owns no memory itself
        weakref.finalize(flat, self._give_back, block).atexit = False
        return flat.reshape(shape)

    def _block(self, size: int) -> mmap.mmap:
        for block in sorted(self._free, key=len):
            if size <= len(block) <= 2 * size:
                try:
                    self._free.remove(block)
                except ValueError:  # another thread has taken it
                    continue
                return block
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a forked process gets a copy
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel that was built without them
                block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def _give_back(self, block: mmap.mmap) -> None:
        # Called wherever the last reference goes, maybe within `_block`: list methods are atomic, and there is no lock.
        self._free.append(block)
        del self._free[:-FREE_BLOCKS]


empty_values = ValueMemory().empty


def value_tables(processor: BaseImageProcessor) -> np.ndarray:
    """(channels, 256) what a processor of transformers, by Pillow, makes of each value: rescaled and normalized."""
    ramp = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))
    scaled = processor.rescale(ramp, processor.rescale_factor) if processor.do_rescale else ramp
    normal = processor.normalize(scaled, processor.image_mean, processor.image_std)
    return np.asarray(normal if processor.do_normalize else scaled, np.float32)[:, 0]
