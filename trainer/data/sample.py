"""The types of data preparation: a sample, its turns and its images."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.sqlite_table import short_digest
from vlmpipe.trainer.storage.base import crc32c_of

Item = TypeVar("Item")

if TYPE_CHECKING:
    from PIL import Image

DEFAULT_SLICE = "all"

Split = Literal["train", "eval"]
PART_MARK = "~turn-"  # before the first turn of a later part of a record, in its id (data.overlong_policy, data.turns)
SPLITS: tuple[Split, ...] = ("eval", "train")  # sorted: the order of splits in the index
SPLIT_NAMES: dict[str, Split] = {  # as sources name them, in a column and in names of files and folders
    "train": "train", "training": "train", "validation": "eval", "valid": "eval", "val": "eval", "dev": "eval",
    "test": "eval", "testing": "eval", "testa": "eval", "testb": "eval", "testdev": "eval", "minival": "eval",
    "eval": "eval", "evaluation": "eval", "holdout": "eval", "heldout": "eval",
}  # fmt: skip
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
    """One question and its answer. The k-th `<image>` in a sample's texts marks where its image k goes."""

    question: str
    answer: str
    slice: str = DEFAULT_SLICE
    system: str = ""  # before the question
    thinking: str = ""  # before the answer
    rejected: str = ""  # an answer that the other is preferred to
    is_context: bool = False  # the answer is read and is no label
    # Left, top, right and bottom of what the answer is about, as shares of the sample's only image; empty: not known.
    region: tuple[float, ...] = ()
    tools: str = ""  # of the conversation, in its first turn: a JSON list of functions
    calls: str = ""  # of tools, after the answer: a JSON list
    results: tuple[str, ...] = ()  # of the calls before, in place of a question
    fields: tuple[tuple[str, str], ...] = ()  # of its record, with their values, that data.slices names

    @property
    def has_tools(self) -> bool:
        return bool(self.tools or self.calls or self.results)

    def texts(self) -> tuple[str, ...]:
        """All texts; without those that most samples lack, where they are empty."""
        others = (self.system, self.thinking) if self.system or self.thinking else ()
        of_tools = tuple(filter(None, (self.tools, self.calls, *self.results))) if self.has_tools else ()
        return (self.question, self.answer, *others, *((self.rejected,) if self.rejected else ()), *of_tools)

    def identity(self) -> tuple[object, ...]:
        """Equal for turns from which a model learns the same."""
        of_tools = ((self.tools, self.calls, *self.results),) if self.has_tools else ()
        return (*self.texts(), *((True,) if self.is_context else ()), *of_tools)


def shuffled_turns(questions: Iterable[tuple[str, str, str]], key: str) -> tuple[Turn, ...]:
    """Turns of one image from (question, answer, slice), in an order that depends only on these and `key`.

    Shuffled, so that a question is asked sometimes before and sometimes after those that give its answer away.
    """
    first, *others = [Turn(*question) for question in stable_shuffle(questions, key)]
    return (Turn(f"{IMAGE_TOKEN}\n{first.question}", first.answer, first.slice), *others)


def png_bytes(image: Image.Image) -> bytes:
    """The image as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def content_of(data: bytes) -> str:
    """Identity of an image's bytes: size and CRC32C, which buckets know without a download.

    The same for all sources, so that an image has the same split in a folder, a bucket, a tar or a Parquet file.
    """
    return f"{len(data)} {crc32c_of(data)}"


@dataclass(frozen=True, slots=True)
class Clip:
    """A video that the model takes as such: patches of two evenly spread frames."""

    patches: int  # in time
    patch_s: float  # seconds from one to the next


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image that has not been read yet. Within one source, equal names mean equal images."""

    name: str
    read: Callable[[], bytes]
    known: Callable[[], str] | None = None  # identifies its bytes without reading them
    size_bytes: Callable[[], int] | None = None  # of the stored file, without reading it; None: it is small
    clip: Clip | None = None  # it is no image but a video, whose frames `read` joins
    is_file: bool = False  # `known` is `content_of` the bytes that `read` returns
    address: str = ""  # of the web, from which it is fetched

    def content(self) -> str:
        """Identity of the image's bytes, see `content_of`."""
        return self.known() if self.known else content_of(self.read())


class Unread(NamedTuple):
    """Something of a record that no reader took. `media`: why it looks like an image, a video or a sound, or "".

    absent: a key that data.columns names, under which the record has no value.
    """

    name: str
    media: str
    absent: bool = False


@dataclass(frozen=True, slots=True)
class Box:
    """A box or a point of an image, which a `<bbox>` in the texts stands for."""

    corners: tuple[float, ...]  # left, top, right, bottom; or x and y of a point
    image: int  # number of the sample's image, from 0
    is_share: bool  # corners are shares of the image's sides, and else pixels of the image as it is shown


@dataclass(frozen=True, slots=True)
class Sample:
    """One image-text record as a source gives it, before any image is opened."""

    id: str
    turns: tuple[Turn, ...]
    images: tuple[ImageRef, ...]
    where: str  # for people: file and line, or the name within a built-in set
    split: Split | None = None  # None: decided by data.split_by
    group: str = ""  # the value of the field that data.split_by names
    unread: tuple[Unread, ...] = ()  # of its record
    id_is_hash: bool = False  # the record has no id, so an equal id means an equal record
    boxes: tuple[Box, ...] = ()  # of the k-th `<bbox>` in the texts

    def image_bytes(self) -> int:
        """Total size of its stored images."""
        return sum(image.size_bytes() for image in self.images if image.size_bytes)

    def content_digest(self) -> str:
        """Equal for two samples with the same turns and images. Hexadecimal."""
        turns = [(*turn.identity(), turn.slice, *turn.fields) for turn in self.turns]
        return stable_digest(*turns, *(image.name for image in self.images), *self.boxes)


def split_of(identity: str, validation_fraction: float) -> Split:
    """The split of a group: a pure function of its name, so that samples never move when data is added."""
    share = int(stable_digest("split", identity)[:16], 16) / 2**64
    return "eval" if share < validation_fraction else "train"


def sample_digest(turns: tuple[Turn, ...], image_sha256: list[str]) -> str:
    """Equal for samples with the same texts, labels and image bytes, whatever their ids. Hexadecimal.

    The index holds it, and samples that are read by range are compared with it: another definition needs another
    `prepared_files.FORMAT`.
    """
    return short_digest([turn.identity() for turn in turns], image_sha256).hex()


def stable_digest(*parts: object) -> str:
    """SHA-256 over the parts' representations: the same on every machine, unlike `hash()`."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


def stable_shuffle(items: Iterable[Item], key: str) -> list[Item]:
    """The items in an order that depends only on their representations and `key`."""
    return sorted(items, key=lambda item: stable_digest(key, item))
