"""Frames of a video in one file: it shows its first frame, and no prepared image is taken for a video."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tests.support.data.prepared import encode, picture
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.prepare.validation.checks import check_clip, check_image
from vlmpipe.trainer.data.sample import Clip
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.models.video_file import VideoFile, frames_of, joined

DATA = DataConfig(source="unused.json", sequence_length=8)


@pytest.mark.parametrize("count", [1, 2, 6])
def test_a_file_has_the_frames_that_were_joined_and_shows_the_first(count: int) -> None:
    frames = [encode(picture(seed, 20 + seed % 2), "JPEG") for seed in range(count)]
    data = joined(frames)
    found = frames_of(data)
    assert found[1:] == frames[1:] and len(found) == count
    expected = np.asarray(Image.open(io.BytesIO(frames[0])))
    for shown in (found[0], data):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(shown))), expected)


def test_no_mark_in_a_file_makes_it_a_video() -> None:
    data = joined([encode(picture(seed), "JPEG") for seed in range(4)])
    assert len(frames_of(data)) == 4 and frames_of(bytes(data)) == [bytes(data)]


def test_a_video_of_the_index_without_frames_is_named() -> None:
    with pytest.raises(DataError, match="calls a video has no frames"):
        frames_of(VideoFile(encode(picture(), "JPEG")))


def test_an_image_is_its_only_frame_even_where_it_was_a_video() -> None:
    """As when the shards of one run are the source of another."""
    frames = [encode(picture(seed), "JPEG") for seed in range(4)]
    data = joined(frames)
    assert frames_of(frames[0]) == [frames[0]] and len(frames_of(data)) == 4
    image, video = check_image(data, DATA), check_clip(data, Clip(2, 0.5), DATA)
    assert frames_of(image.data) == [image.data] and image.size == (24, 24) and image.clip is None
    assert video.data == data and video.sha256 != image.sha256
