"""Frames of a video in one file of prepared data: JPEG images one after the other.

Programs that open images show the first frame. An APP1 segment in it, where cameras put EXIF, lists the bytes of each
frame. The index of prepared data says which files are videos; what a file says of itself never makes it one.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

from vlmpipe.trainer.errors import DataError

START = b"\xff\xd8"
HEAD = START + b"\xff\xe1"  # and the length of the segment, in two bytes that count themselves
TAG = b"video frames\0"
TAG_AT = len(HEAD) + 2
MAX_FRAMES = 16_000  # whose sizes fit into a segment


class VideoFile(bytes):
    """The bytes of a file that the index of prepared data calls a video."""


def joined(frames: Sequence[bytes]) -> VideoFile:
    """One file of these JPEG images."""
    first, *others = frames
    first = first[len(START) :]  # which HEAD begins with
    head_bytes = TAG_AT + len(TAG) + 4 * len(frames)
    sizes = struct.pack(f">{len(frames)}I", head_bytes + len(first), *map(len, others))
    return VideoFile(b"".join([HEAD, struct.pack(">H", head_bytes - len(HEAD)), TAG, sizes, first, *others]))


def frames_of(data: bytes) -> list[bytes]:
    """The frames of a video, each a JPEG image. Of any other file, the file, whatever is in it.

    Raises DataError for a video whose frames are not listed in it.
    """
    if not isinstance(data, VideoFile):
        return [data]
    if not (data.startswith(HEAD) and data.startswith(TAG, TAG_AT)):
        raise DataError(
            "an image that the index calls a video has no frames",
            expected="prepared data whose shards and index belong together",
            fix="delete the DONE file of the prepared data and run again: the data is then prepared again",
        )
    stop = len(HEAD) + struct.unpack_from(">H", data, len(HEAD))[0]
    sizes = [size for (size,) in struct.iter_unpack(">I", data[TAG_AT + len(TAG) : stop])]
    return [data[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
