"""Images of the Qwen-VL families as patches: the bits of the library's own processor, in less time.

The library's goes over all values for each of its steps: rescaling in fp64, normalizing, reordering, repeating. Here a
table holds what the first two make of each of 256 values, and rows of tokens pass all steps within the CPU's cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from transformers import BaseImageProcessor, Qwen2VLImageProcessorPil

from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.image_inputs import Grid, Images
from vlmpipe.trainer.models.image_threads import for_each
from vlmpipe.trainer.models.pixels import decoded, empty_values, opened, value_tables
from vlmpipe.trainer.models.video_file import frames_of
from vlmpipe.trainer.sizing.image_grids import ImageGrids

CHANNELS = 3


@dataclass(frozen=True)
class _Frame:
    """A frame of an image or a video, and where its patches belong."""

    data: bytes
    place: np.ndarray  # (rows x columns, channels, frames of a patch, pixels of a patch): in all its frames or in one
    rows: int
    columns: int


class PatchPreparer:
    """Decodes images and cuts them into patches.

    Raises ConfigError for a processor of another class, whose patches may differ from those counted.
    """

    def __init__(self, processor: BaseImageProcessor, grids: ImageGrids) -> None:
        if type(processor) is not Qwen2VLImageProcessorPil or not processor.do_resize:
            raise ConfigError(
                f"the image processor of model.pretrained is a {type(processor).__name__} "
                f"(do_resize {processor.do_resize}), whose patches are not known here",
                expected="Qwen2-VL's own, which resizes",
                fix="take the image processor's settings from the model's first release",
            )
        self._grids, self._resample = grids, processor.resample
        self._frames = int(processor.temporal_patch_size)
        self._values = value_tables(processor).reshape(-1)  # (channels x 256,)

    def __call__(self, images: Sequence[bytes], _samples: Sequence[int] | None = None) -> Images:
        """Encoded images and videos, possibly none -> (patches, numbers) in fp32, and grids."""
        files = [frames_of(data) for data in images]
        # From the first frame's header: frames of a video are all of one size.
        times = [max(1, len(frames) // self._frames) for frames in files]
        grids = [(time, *self._grids.of(*opened(frames[0]).size)) for time, frames in zip(times, files, strict=True)]
        of_patch = (CHANNELS, self._frames, self._grids.patch**2)
        patches = empty_values(sum(map(math.prod, grids)), math.prod(of_patch))
        ends = list(itertools.accumulate(map(math.prod, grids)))
        places = np.split(patches.reshape(-1, *of_patch), ends[:-1]) if ends else []
        for_each(
            self._fill,
            [
                frame
                for frames, grid, place in zip(files, grids, places, strict=True)
                for frame in self._placed(frames, grid, place)
            ],
        )
        return Images(torch.from_numpy(patches), tuple(grids))

    def _placed(self, frames: Sequence[bytes], grid: Grid, place: np.ndarray) -> list[_Frame]:
        """place: the patches of an image or video. An image fills all places in time of its patches; of a video the
        n-th frame of a patch fills the n-th."""
        times, rows, columns = grid
        if len(frames) == 1:
            return [_Frame(frames[0], place, rows, columns)]
        at = place.reshape(times, rows * columns, *place.shape[1:])
        return [
            _Frame(data, at[number // self._frames, :, :, number % self._frames, None], rows, columns)
            for number, data in enumerate(frames)
        ]

    def _fill(self, frame: _Frame) -> None:
        """Write a frame's patches: tokens row by row, in a token its patches row by row, in a patch its channels."""
        merge, side = self._grids.merge, self._grids.patch
        size = (frame.columns * side, frame.rows * side)
        image = np.asarray(decoded(frame.data).resize(size, Image.Resampling(self._resample)))
        token_rows, tokens = frame.rows // merge, frame.columns // merge
        # (token rows, tokens, patch rows of a token, patches there, channels, rows of a patch, pixels there)
        cut = image.reshape(token_rows, merge, side, tokens, merge, side, CHANNELS).transpose(0, 3, 1, 4, 6, 2, 5)
        shape = cut.shape[1:]
        index = np.empty(shape, np.intp)
        values = np.empty((math.prod(shape[:3]), CHANNELS, side**2), np.float32)
        of_channel = 256 * np.arange(CHANNELS)[:, None, None]
        place = frame.place.reshape(token_rows, len(values), *frame.place.shape[1:])
        for row, target in zip(cut, place, strict=True):
            np.add(row, of_channel, out=index)
            np.take(self._values, index.reshape(values.shape), out=values, mode="clip")  # other modes copy first
            target[:] = values[:, :, None]
