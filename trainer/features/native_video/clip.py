"""Reads a video as one file of evenly spread frames, two for each patch in time."""

from __future__ import annotations

from functools import partial

from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import Clip, ImageRef
from vlmpipe.trainer.data.sources.image_files import ImageFiles
from vlmpipe.trainer.data.video import Video
from vlmpipe.trainer.models.video_file import VideoFile, joined
from vlmpipe.trainer.sizing.image_grids import FRAMES_PER_PATCH


def clip_reference(files: ImageFiles, path: str, max_frames: int, fps: float) -> ImageRef:
    """A video as such, with an even number of frames that are spread as by `ImageFiles.video_frames`.

    Raises RejectedError, also where it has too few frames for a patch.
    """
    name, duration_s, frames = files.video(path)
    requested = min(max_frames, int(duration_s * fps)) if fps else max_frames
    count = min(requested, frames) // FRAMES_PER_PATCH * FRAMES_PER_PATCH
    if not count:
        at_rate = f", {requested} at data.video_fps {fps:g}" if fps else ""
        message = f"{name} has {duration_s:.3g} s and {frames} frames{at_rate}; a patch takes {FRAMES_PER_PATCH}"
        raise RejectedError(RejectCode.MEDIA_MISSING_PART, message)
    clip = Clip(count // FRAMES_PER_PATCH, FRAMES_PER_PATCH * duration_s / count)
    return files.whole_video(name, f"frames={count}", partial(joined_frames, count=count), clip)


def joined_frames(video: Video, count: int) -> VideoFile:
    """Return a file of `count` evenly spread frames. Raises RejectedError where they differ in size."""
    frames, sizes = [], set()
    for number in range(count):
        frames.append(video.frame(video.duration_s * (number + 0.5) / count))
        sizes.add(video.frame_size)
    if len(sizes) > 1:
        named = " and ".join(f"{width} x {height}" for width, height in sorted(sizes))
        raise video.unreadable(f"has frames of {named} pixels")
    return joined(frames)
