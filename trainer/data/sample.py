"""The types of data preparation: a sample, its turns and its images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from trainer.storage.base import crc32c_of

DEFAULT_SLICE = "all"

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("eval", "train")  # sorted: the order of splits in the index
# Image formats, and the file name suffixes of each.
EXTENSIONS = {
    "JPEG": {".jpg", ".jpeg"},
    "MPO": {".jpg", ".jpeg", ".mpo"},
    "PNG": {".png"},
    "WEBP": {".webp"},
    "GIF": {".gif"},
    "BMP": {".bmp"},
    "TIFF": {".tif", ".tiff"},
}
IMAGE_SUFFIXES = frozenset().union(*EXTENSIONS.values())


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer. The question marks where image k goes by its k-th `<image>`."""

    question: str
    answer: str
    slice: str = DEFAULT_SLICE


def content_of(data: bytes) -> str:
    """What tells an image's bytes apart from others: what buckets know of their objects without a download.

    The same for all sources, so that an image has the same split in a folder, a bucket, a tar or a Parquet file.
    """
    return f"{len(data)} {crc32c_of(data)}"


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image that has not been read yet. Within one source, equal names mean equal images."""

    name: str
    read: Callable[[], bytes]
    known: Callable[[], str] | None = None  # tells its bytes apart from others without reading them
    size_bytes: Callable[[], int] | None = None  # as it is stored, told without reading it; None: it is small

    def content(self) -> str:
        """Changes with the image's bytes: what the source knows of them, or `content_of` them."""
        return self.known() if self.known else content_of(self.read())


@dataclass(frozen=True, slots=True)
class Sample:
    """One image-text record as a source gives it, before any image is opened."""

    id: str
    turns: tuple[Turn, ...]
    images: tuple[ImageRef, ...]
    where: str  # for people: file and line, or the name within a built-in set
    split: Split | None = None  # None: decided by data.split_by
    group: str = ""  # the value of the field that data.split_by names

    def image_bytes(self) -> int:
        """What all its images take as they are stored."""
        return sum(image.size_bytes() for image in self.images if image.size_bytes)

    def content_digest(self) -> str:
        """Equal for two samples that say the same about the same images. Hexadecimal."""
        return stable_digest(*((t.question, t.answer, t.slice) for t in self.turns), *(i.name for i in self.images))


def split_of(identity: str, validation_fraction: float) -> Split:
    """The split of whatever has this name: a pure function, so samples never move when data is added."""
    share = int(stable_digest("split", identity)[:16], 16) / 2**64
    return "eval" if share < validation_fraction else "train"


def stable_digest(*parts: object) -> str:
    """SHA-256 over the parts' representations: the same on every machine, unlike `hash()`."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


def stable_shuffle(items: Iterable[Any], key: str) -> list[Any]:
    """The items in an order that depends only on their representations and `key`."""
    return sorted(items, key=lambda item: stable_digest(key, item))
