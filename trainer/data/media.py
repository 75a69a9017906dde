"""Pictures inside other files: pages of documents, frames of videos.

A record names one by a fragment behind the file's path: `#page=2` (RFC 8118), `#t=1.5` in seconds (Media Fragments URI
1.0), or `#frame=1/8`, the first of eight frames that are evenly spread.
"""

from __future__ import annotations

import importlib
import io
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import content_of, png_bytes
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.extras import install_command
from vlmpipe.trainer.models.video_file import joined

VIDEOS = frozenset({".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi"})
PDF, TIFFS = ".pdf", frozenset({".tif", ".tiff"})
FRAGMENT = re.compile(r"(.+)#(?:page=([1-9]\d*)|t=(\d+(?:\.\d+)?)|(?:frame=([1-9]\d*)/|frames=)([1-9]\d*))")
PDF_POINTS = 72  # an inch
PAGE_DPI = 144
MOST_PAGE_PIXELS = 50_000_000  # a page may claim any size
JPEG_QUALITY = 95
PNG_MODES = frozenset(
    {"1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B", "I", "F"}
)  # those of numbers are refused later
MOST_STILL_S = 1.0  # that a last frame of unknown duration is shown


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
    if not (found := FRAGMENT.fullmatch(path)):
        return None
    file, page, time_s, frame, frames = found.groups()
    suffix, fragment = PurePosixPath(file).suffix.lower(), path.removeprefix(f"{file}#")
    if page and (suffix == PDF or suffix in TIFFS):
        return Part(file, fragment, page=int(page))
    if not page and suffix in VIDEOS:
        moment = Part(file, fragment, time_s=float(time_s or 0), frame=int(frame or 0), frames=int(frames or 0))
        return moment if moment.frame <= moment.frames else None
    return None


class MediaFiles:
    """Reads parts of files. Each thread keeps the file of its last part open, since parts of one come together."""

    def __init__(self, read: Callable[[str], bytes]) -> None:
        """`read`: the bytes of a file. Raises RejectedError."""
        self._read = read
        self._threads = threading.local()

    def picture(self, part: Part) -> bytes:
        """A page as PNG, a frame as JPEG, a clip as `vlmpipe.trainer.models.video_file` joins its frames.

        Raises RejectedError, and UserError (69) without the package that decodes.
        """
        opened = self._opened(part.file)
        try:
            return opened.picture(part)
        except (UserError, RejectedError):
            raise
        except Exception as error:  # decoders of damaged files raise what they like
            raise RejectedError(RejectCode.MEDIA_UNREADABLE, f"{part.file}: {error}") from error

    def content(self, part: Part) -> str:
        """Identity of the picture, without decoding it."""
        return f"{self._opened(part.file).content} {part.fragment}"

    def length(self, file: str) -> tuple[float, int]:
        """Seconds and frames of a video. Raises RejectedError."""
        opened = self._opened(file)
        try:
            return opened.video().duration_s, opened.video().num_frames
        except (UserError, RejectedError):
            raise
        except Exception as error:
            raise RejectedError(RejectCode.MEDIA_UNREADABLE, f"{file}: {error}") from error

    def _opened(self, file: str) -> _Opened:
        last: _Opened | None = getattr(self._threads, "last", None)
        if last is None or last.file != file:
            if last:
                last.close()
            last = self._threads.last = _Opened(file, self._read(file))
        return last


class _Opened:
    """A file in memory, with its decoder once it was needed."""

    def __init__(self, file: str, data: bytes) -> None:
        self.file, self._data, self.content = file, data, content_of(data)
        self._video: _Video | None = None

    def picture(self, part: Part) -> bytes:
        if part.is_clip:
            return self.video().clip(part)
        if not part.page:
            return self.video().frame(part)
        return self._pdf_page(part) if part.file.lower().endswith(PDF) else self._tiff_page(part)

    def video(self) -> _Video:
        if self._video is None:
            self._video = _Video(self.file, self._data)
        return self._video

    def close(self) -> None:
        if self._video:
            self._video.close()

    def _pdf_page(self, part: Part) -> bytes:
        pdfium = _package("pypdfium2")
        with _PDFIUM, closing(pdfium.PdfDocument(self._data)) as document:
            document.init_forms()  # before a page is loaded, else fields are left out
            if part.page > len(document):
                raise _missing(part, f"{len(document)} pages")
            page = document[part.page - 1]
            width, height = (points * PAGE_DPI / PDF_POINTS for points in page.get_size())
            shrunk = min(1.0, (MOST_PAGE_PIXELS / max(1.0, width * height)) ** 0.5)
            return png_bytes(page.render(scale=shrunk * PAGE_DPI / PDF_POINTS).to_pil().convert("RGB"))

    def _tiff_page(self, part: Part) -> bytes:
        from PIL import Image  # a machine that compiles only has none

        with Image.open(io.BytesIO(self._data), formats=("TIFF",)) as image:
            pages = getattr(image, "n_frames", 1)
            if part.page > pages:
                raise _missing(part, f"{pages} pages")
            image.seek(part.page - 1)
            page = image.copy()
            if page.mode not in PNG_MODES:
                page = page.convert("RGB")
            return png_bytes(page)


_PDFIUM = threading.Lock()  # the library is not safe to use from several threads


class _Video:
    """Frames of a video, fast where their times ascend: then nothing is decoded twice."""

    def __init__(self, file: str, data: bytes) -> None:
        self._av, self._file = _package("av"), file
        self._container = self._av.open(io.BytesIO(data))
        if not self._container.streams.video:
            raise RejectedError(RejectCode.MEDIA_UNREADABLE, f"{file} has no video")
        self._stream = self._container.streams.video[0]
        self._stream.thread_type = "NONE"  # samples are prepared in threads already
        length, base = self._stream.duration, self._stream.time_base
        in_container = (self._container.duration or 0) / self._av.time_base
        self.duration_s = float(length * base) if length else float(in_container)
        self._start_s = float((self._stream.start_time or 0) * base)
        # By the header, or as many as there can be at its rate.
        self.num_frames = self._stream.frames or round(self.duration_s * float(self._stream.average_rate or 0))
        self._frames: Iterator[Any] = iter(())
        self._at: Any = None  # the frame decoded last
        self._next: Any = None

    def frame(self, part: Part) -> bytes:
        """The frame that is shown at the part's time."""
        time_s = self.duration_s * (part.frame - 0.5) / part.frames if part.frame else part.time_s
        if time_s >= self.duration_s:
            raise _missing(part, f"{self.duration_s:g} s")
        target_s = self._start_s + time_s
        if self._at is None or self._at.time > target_s:
            self._container.seek(int(target_s / self._stream.time_base), stream=self._stream)
            self._frames = self._container.decode(self._stream)
            self._at, self._next = None, next(self._frames, None)
        while self._next is not None and (self._at is None or self._next.time <= target_s):
            self._at, self._next = self._next, next(self._frames, None)
        if self._at is None:
            raise RejectedError(RejectCode.MEDIA_UNREADABLE, f"{self._file} has no frame at {time_s:.3g} s")
        shown_s = max(MOST_STILL_S, float((self._at.duration or 0) * self._at.time_base))
        if self._next is None and target_s - self._at.time > shown_s:
            ends_s = self._at.time - self._start_s
            message = f"{self._file} ends after {ends_s:.3g} s, and has {self.duration_s:.3g} s by its header"
            raise RejectedError(RejectCode.MEDIA_UNREADABLE, message)
        buffer = io.BytesIO()
        # The file's matrix turns the frame counterclockwise, as phones that are held upright write it.
        image = self._at.to_image().rotate(getattr(self._at, "rotation", 0), expand=True)
        image.save(buffer, "JPEG", quality=JPEG_QUALITY)
        return buffer.getvalue()

    def clip(self, part: Part) -> bytes:
        """All frames of the part in one file."""
        frames, sizes = [], set()
        for number in range(1, part.frames + 1):
            fragment = f"frame={number}/{part.frames}"
            frames.append(self.frame(Part(part.file, fragment, frame=number, frames=part.frames)))
            sizes.add((self._at.width, self._at.height))
        if len(sizes) > 1:
            found = " and ".join(f"{width} x {height}" for width, height in sorted(sizes))
            raise RejectedError(RejectCode.MEDIA_UNREADABLE, f"{self._file} has frames of {found} pixels")
        return joined(frames)

    def close(self) -> None:
        self._container.close()


def _missing(part: Part, has: str) -> RejectedError:
    return RejectedError(RejectCode.MEDIA_MISSING_PART, f"{part.file} has {has}, not #{part.fragment}")


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"data with documents or videos needs {name}, which is not installed",
            fix=install_command("media"),
            code=ExitCode.UNAVAILABLE,
        ) from error
