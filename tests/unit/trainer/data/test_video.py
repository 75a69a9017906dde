"""Videos of strangers: FFmpeg opens one demuxer of a closed list, no protocol, and nothing too large or too slow."""

from __future__ import annotations

import io
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import av
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.support.data.prepared import png
from tests.support.data.videos import write_video
from tests.support.fuzz import fuzzed
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.video import Video, VideoLimits, demuxer_of

LIMITS = VideoLimits(max_pixels=10_000)
PLAYLIST = b"ffconcat version 1.0\nfile secret.png\n"
SESSION = (
    b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 55555 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
)


def rejected(data: bytes, limits: VideoLimits = LIMITS) -> RejectedError:
    with pytest.raises(RejectedError) as error:
        Video("v.mp4", data, limits).frame(0.0)
    return error.value


def encoded(
    codec: str, container: str, width: int = 64, height: int = 48, frames: int = 5, pixels: str = "yuv420p"
) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        for number in range(frames):
            values = np.full((height, width, 3), 40 * number, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgb24")))
        output.mux(stream.encode())
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("codec", "container", "demuxer"),
    [("mpeg4", "mp4", "mov"), ("mpeg4", "mov", "mov"), ("mpeg4", "matroska", "matroska"), ("mpeg4", "avi", "avi"),
     ("libvpx-vp9", "webm", "matroska"), ("libx264", "mp4", "mov"), ("mjpeg", "avi", "avi")],
)  # fmt: skip
def test_usual_videos_are_read(codec: str, container: str, demuxer: str) -> None:
    pixels = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    data = encoded(codec, container, pixels=pixels)
    assert demuxer_of(data) == demuxer
    assert Video("v", data, LIMITS).frame(0.0).startswith(b"\xff\xd8")


@pytest.mark.parametrize(
    "data",
    [PLAYLIST, SESSION, b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n", png(), b"", b"\0" * 100, b"<MPD/>",
     encoded("gif", "gif", pixels="rgb8"), encoded("mpeg4", "mpegts"), b"%PDF-1.7"],
    ids=["playlist", "session", "m3u8", "png", "empty", "zeros", "dash", "gif", "transport stream", "pdf"],
)  # fmt: skip
def test_other_files_are_not_opened_whatever_their_name(data: bytes) -> None:
    with mock.patch.object(av, "open", side_effect=AssertionError("opened")):
        error = rejected(data)
    assert error.code == RejectCode.MEDIA_UNREADABLE and "is no MP4" in str(error)


@pytest.mark.parametrize("text", [PLAYLIST, SESSION])
@pytest.mark.parametrize("start", [b"\0\0\0\x18ftypmp42", b"\x1a\x45\xdf\xa3", b"RIFF\0\0\0\0AVI "])
def test_a_text_behind_the_first_bytes_of_a_video_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, text: bytes
) -> None:
    (tmp_path / "secret.png").write_bytes(png())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("a socket"))
    with pytest.raises((RejectedError, av.error.FFmpegError)):
        Video("v.mp4", start + text, LIMITS).frame(0.0)


def test_a_codec_of_images_is_refused() -> None:
    error = rejected(encoded("png", "mov", pixels="rgb24"))
    assert error.code == RejectCode.MEDIA_UNREADABLE and "has the codec png" in str(error)


@pytest.mark.parametrize("codec", ["png", "mpeg4", "libx264"])
@pytest.mark.parametrize(("width", "height"), [(400, 300), (1600, 1200)])
def test_frames_of_too_many_pixels_are_refused_before_any_is_decoded(codec: str, width: int, height: int) -> None:
    data = encoded(codec, "mov", width, height, frames=1, pixels="rgb24" if codec == "png" else "yuv420p")
    with mock.patch.object(Video, "_decoded", side_effect=AssertionError("decoded")):
        error = rejected(data)
    if error.code == RejectCode.IMAGE_TOO_LARGE:
        assert f"{width} x {height} pixels, more than data.max_image_pixels 10000" in str(error)
    else:
        assert codec == "png" or ((codec, width) == ("mpeg4", 1600) and "larger than FFmpeg may decode" in str(error))


def test_a_file_that_takes_too_long_is_refused(tmp_path: Path) -> None:
    data = write_video(tmp_path / "v.mp4").read_bytes()
    clock = iter(range(1000))
    with mock.patch("vlmpipe.trainer.data.video.time.thread_time", side_effect=lambda: float(next(clock))):
        video = Video("v.mp4", data, VideoLimits(10_000, max_decoding_s=5.0))
        video.frame(0.0)
        with pytest.raises(RejectedError, match=r"v\.mp4 takes more than 5 s to decode"):
            video.frame(3.5)


VIDEOS = [encoded("mpeg4", "mp4"), encoded("mpeg4", "matroska"), encoded("mpeg4", "avi"), encoded("libx264", "mp4")]


@fuzzed(150, share=3)
@given(
    data=st.sampled_from(VIDEOS),
    place=st.floats(0, 1, exclude_max=True),
    inserted=st.binary(max_size=8),
    removed=st.integers(0, 200),
)
def test_damaged_videos_give_frames_within_the_limits_or_are_refused(
    data: bytes, place: float, inserted: bytes, removed: int
) -> None:
    at = int(place * len(data))
    try:
        video = Video("v.mp4", data[:at] + inserted + data[at + removed :], LIMITS)
        frame = video.frame(0.0)
    except (RejectedError, av.error.FFmpegError, ValueError, ZeroDivisionError, OverflowError, TypeError):
        event("rejected")
        return
    event("a frame")
    assert frame.startswith(b"\xff\xd8")
