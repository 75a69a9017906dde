"""Frames of videos in containers and codecs of a closed list, within limits that are known before a frame is decoded.

FFmpeg opens whatever it recognizes in a file's bytes: playlists that name further files, descriptions of network
streams, images of any size. So the first bytes decide which one demuxer may read the file, and no protocol is open.
"""

from __future__ import annotations

import importlib
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.extras import install_command

VIDEOS = frozenset({".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi"})
# The kind of the first atom of an MP4 or QuickTime file (ISO/IEC 14496-12, 4.2; QuickTime File Format, chapter 1).
MOV_ATOMS = frozenset({b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"})
MATROSKA_START = b"\x1a\x45\xdf\xa3"  # EBML (RFC 8794, 11.2.1), also of WebM
DECODERS = frozenset(
    {
        "h264", "hevc", "av1", "libdav1d", "libaom-av1", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4", "mpeg2video",
        "mpeg1video", "mjpeg",
    }
)  # fmt: skip
JPEG_QUALITY = 95
MAX_STILL_S = 1.0  # that a last frame of unknown duration is shown
MAX_DECODING_S = 300.0  # of one file, in this thread's processor time: the same on a busy machine


@dataclass(frozen=True)
class VideoLimits:
    """Limits of decoding one file."""

    max_pixels: int  # of a frame
    max_decoding_s: float = MAX_DECODING_S

    def in_decoder(self) -> int:
        """The most pixels of a frame with the borders that decoders put around it, in a decoder's memory."""
        return 2 * self.max_pixels + (1 << 20)


def demuxer_of(data: bytes) -> str:
    """FFmpeg's name of the container that a file's first bytes are of; "" for another."""
    if data[4:8] in MOV_ATOMS:
        return "mov"
    if data.startswith(MATROSKA_START):
        return "matroska"
    return "avi" if data[:4] == b"RIFF" and data[8:12] == b"AVI " else ""


class Video:
    """Frames of a video, fast where their times ascend: then nothing is decoded twice."""

    def __init__(self, file: str, data: bytes, limits: VideoLimits) -> None:
        """Raises RejectedError for a file outside of the closed lists and one with frames of too many pixels."""
        self._av, self._file, self._limits, self._used_s = media_package("av"), file, limits, 0.0
        demuxer = demuxer_of(data)
        if not demuxer:
            raise self.unreadable(f"is no MP4, QuickTime, Matroska, WebM or AVI file: it starts with {data[:12]!r}")
        codec_options = {"codec_whitelist": ",".join(sorted(DECODERS)), "max_pixels": str(limits.in_decoder())}
        self._container = self._av.open(
            io.BytesIO(data),
            format=demuxer,
            options=codec_options,
            container_options={"protocol_whitelist": "none", "format_whitelist": demuxer},
        )
        if not self._container.streams.video:
            raise self.unreadable("has no video")
        self._stream = self._container.streams.video[0]
        self._stream.thread_type = "NONE"  # samples are prepared in threads already
        context = self._stream.codec_context
        if context is None:
            raise self.unreadable("has no codec that is known")
        if context.codec.name not in DECODERS:
            raise self.unreadable(f"has the codec {context.codec.name}, which is none of {', '.join(sorted(DECODERS))}")
        if not context.width * context.height:  # the decoder says so of larger frames than it may make
            raise self.unreadable("does not say how large its frames are, or they are larger than FFmpeg may decode")
        if context.width * context.height > limits.max_pixels:
            message = f"{file}: frames of {context.width} x {context.height} pixels, more than data.max_image_pixels "
            raise RejectedError(RejectCode.IMAGE_TOO_LARGE, f"{message}{limits.max_pixels}")
        context.options = codec_options  # frames may say another size than the container
        length, base = self._stream.duration, self._stream.time_base
        in_container = (self._container.duration or 0) / self._av.time_base
        self.duration_s = float(length * base) if length else float(in_container)
        self._start_s = float((self._stream.start_time or 0) * base)
        # By the header, or as many as there can be at its rate.
        self.num_frames = self._stream.frames or round(self.duration_s * float(self._stream.average_rate or 0))
        self._frames: Iterator[object] = iter(())
        self._at: Any = None  # the frame decoded last
        self._next: Any = None

    def frame(self, time_s: float) -> bytes:
        """The frame that is shown at a time before the video's end, as JPEG."""
        target_s = self._start_s + time_s
        if self._at is None or self._at.time > target_s:
            self._container.seek(int(target_s / self._stream.time_base), stream=self._stream)
            self._frames = self._container.decode(self._stream)
            self._at, self._next = None, self._decoded()
        while self._next is not None and (self._at is None or self._next.time <= target_s):
            self._at, self._next = self._next, self._decoded()
        if self._at is None:
            raise self.unreadable(f"has no frame at {time_s:.3g} s")
        shown_s = max(MAX_STILL_S, float((self._at.duration or 0) * self._at.time_base))
        if self._next is None and target_s - self._at.time > shown_s:
            ends_s = self._at.time - self._start_s
            raise self.unreadable(f"ends after {ends_s:.3g} s, and has {self.duration_s:.3g} s by its header")
        buffer = io.BytesIO()
        # The file's matrix turns the frame counterclockwise, as phones that are held upright write it.
        image = self._at.to_image().rotate(getattr(self._at, "rotation", 0), expand=True)
        image.save(buffer, "JPEG", quality=JPEG_QUALITY)
        return buffer.getvalue()

    @property
    def frame_size(self) -> tuple[int, int]:
        """(width, height) of the frame decoded last, before it is turned."""
        return self._at.width, self._at.height

    def close(self) -> None:
        self._container.close()

    def _decoded(self) -> object:
        """The next frame, None at the end. Raises RejectedError once the file has taken too long."""
        started_s = time.thread_time()
        frame = next(self._frames, None)
        self._used_s += time.thread_time() - started_s
        if self._used_s > self._limits.max_decoding_s:
            raise self.unreadable(f"takes more than {self._limits.max_decoding_s:g} s to decode")
        return frame

    def unreadable(self, problem: str) -> RejectedError:
        return RejectedError(RejectCode.MEDIA_UNREADABLE, f"{self._file} {problem}")


def media_package(name: str) -> ModuleType:
    """A package that decodes documents or videos. Raises UserError (69) where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"data with documents or videos needs {name}, which is not installed",
            fix=install_command("media"),
            code=ExitCode.UNAVAILABLE,
        ) from error
