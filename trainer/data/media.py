"""Images inside other files: pages of documents, frames of videos.

A record names one by a fragment after the file's path: `#page=2` (RFC 8118), `#t=1.5` in seconds (Media Fragments URI
1.0), or `#frame=1/8`, the first of eight frames that are evenly spread.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeVar

from vlmpipe.trainer.data.pdf_pages import PAGES, NoSuchPageError, PageError
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import content_of, png_bytes
from vlmpipe.trainer.data.video import VIDEOS, Video, VideoLimits, media_package
from vlmpipe.trainer.errors import UserError

PDF, TIFFS = ".pdf", frozenset({".tif", ".tiff"})
FRAGMENT = re.compile(r"(.+)#(?:page=([1-9]\d*)|t=(\d+(?:\.\d+)?)|(?:frame=([1-9]\d*)/|frames=)([1-9]\d*))")
Result = TypeVar("Result")
PNG_MODES = frozenset(
    {"1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B", "I", "F"}
)  # those of numbers are refused later


@dataclass(frozen=True)
class Part:
    """A page of a document, or a moment of a video."""

    file: str
    fragment: str
    page: int = 0  # from 1; 0: of a video
    time_s: float = 0.0
    frame: int = 0  # from 1, of `frames`; 0: `time_s` counts
    frames: int = 0  # evenly spread

    @property
    def is_clip(self) -> bool:
        """All of `frames` together. No record names such a part."""
        return self.frames > 0 and not self.frame


def part_of(path: str) -> Part | None:
    """The part that a path names, of a file that may have such parts; None for other paths."""
    if not (match := FRAGMENT.fullmatch(path)):
        return None
    file, page, time_s, frame, frames = match.groups()
    suffix, fragment = PurePosixPath(file).suffix.lower(), path.removeprefix(f"{file}#")
    if page and (suffix == PDF or suffix in TIFFS):
        return Part(file, fragment, page=int(page))
    if not page and suffix in VIDEOS:
        moment = Part(file, fragment, time_s=float(time_s or 0), frame=int(frame or 0), frames=int(frames or 0))
        return moment if moment.frame <= moment.frames else None
    return None


class MediaFiles:
    """Reads parts of files. Each thread keeps the file of its last part open, since parts of one come together."""

    def __init__(self, read: Callable[[str], bytes], limits: VideoLimits) -> None:
        """`read`: the bytes of a file. Raises RejectedError."""
        self._read, self._limits = read, limits
        self._threads = threading.local()

    def image(self, part: Part) -> bytes:
        """A page as PNG, a frame as JPEG. Raises RejectedError, and UserError (69) without the package that decodes."""
        opened = self._opened(part.file)
        return _decoded(part.file, lambda: opened.image(part))

    def content(self, part: Part) -> str:
        """Identity of the image, without decoding it."""
        return f"{self._opened(part.file).content} {part.fragment}"

    def length(self, file: str) -> tuple[float, int]:
        """Seconds and frames of a video. Raises RejectedError."""
        return self.of_video(file, lambda video: (video.duration_s, video.num_frames))

    def of_video(self, file: str, read: Callable[[Video], Result]) -> Result:
        """Return the result of a function of a video. Raises as `image`."""
        opened = self._opened(file)
        return _decoded(file, lambda: read(opened.video()))

    def _opened(self, file: str) -> _Opened:
        last: _Opened | None = getattr(self._threads, "last", None)
        if last is None or last.file != file:
            if last:
                self._threads.last = None  # also where the next file cannot be read: a closed decoder ends the process
                last.close()
            last = self._threads.last = _Opened(file, self._read(file), self._limits)
        return last


class _Opened:
    """A file in memory, with its decoder once it was needed."""

    def __init__(self, file: str, data: bytes, limits: VideoLimits) -> None:
        self.file, self._data, self._limits, self.content = file, data, limits, content_of(data)
        self._video: Video | None = None

    def image(self, part: Part) -> bytes:
        if not part.page:
            return self._frame(part)
        return self._pdf_page(part) if part.file.lower().endswith(PDF) else self._tiff_page(part)

    def video(self) -> Video:
        if self._video is None:
            self._video = Video(self.file, self._data, self._limits)
        return self._video

    def _frame(self, part: Part) -> bytes:
        video = self.video()
        time_s = video.duration_s * (part.frame - 0.5) / part.frames if part.frame else part.time_s
        if time_s >= video.duration_s:
            raise _missing(part, f"{video.duration_s:g} s")
        return video.frame(time_s)

    def close(self) -> None:
        if self._video:
            self._video.close()

    def _pdf_page(self, part: Part) -> bytes:
        media_package("pypdfium2")
        try:
            return PAGES.png(self._data, self.content, part.page)
        except NoSuchPageError as error:
            raise _missing(part, str(error)) from error
        except PageError as error:
            raise RejectedError(RejectCode.MEDIA_UNREADABLE, f"{part.file} #{part.fragment}: {error}") from error

    def _tiff_page(self, part: Part) -> bytes:
        from PIL import Image  # a machine that compiles only has none

        with Image.open(io.BytesIO(self._data), formats=("TIFF",)) as image:
            pages = getattr(image, "n_frames", 1)
            if part.page > pages:
                raise _missing(part, f"{pages} pages")
            image.seek(part.page - 1)
            if image.width * image.height > self._limits.max_pixels:
                message = f"{part.file}: a page of {image.width} x {image.height} pixels, more than "
                raise RejectedError(
                    RejectCode.IMAGE_TOO_LARGE, f"{message}data.max_image_pixels {self._limits.max_pixels}"
                )
            page = image.copy()
            if page.mode not in PNG_MODES:
                page = page.convert("RGB")
            return png_bytes(page)


def _decoded(file: str, read: Callable[[], Result]) -> Result:
    try:
        return read()
    except (UserError, RejectedError):
        raise
    except Exception as error:  # decoders of damaged files raise what they like
        raise RejectedError(RejectCode.MEDIA_UNREADABLE, f"{file}: {error}") from error


def _missing(part: Part, has: str) -> RejectedError:
    return RejectedError(RejectCode.MEDIA_MISSING_PART, f"{part.file} has {has}, not #{part.fragment}")
