"""Reject codes and the ledger of rejected samples."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.printable import one_line

if TYPE_CHECKING:
    from vlmpipe.trainer.data.sample import ImageRef

MESSAGE_CHARS = 300
EXAMPLES_PER_CODE = 3
KEPT = "rejected"  # folder of a run, after a failed preparation
REJECTS = "rejects.jsonl"
SUMMARY = "rejects_summary.json"
IN_THE_RUN = f"{KEPT}/{REJECTS} in the run's folder"

# What earlier versions said of a sample with few images, whose tiles they counted as images.
OF_TILES = re.compile(r"\d+ images in \d+ tiles, more than ")

T = TypeVar("T")


class RejectCode(StrEnum):
    """Every reason to reject a sample. docs/reference/data-formats.md lists them with fixes."""

    RECORD_ENCODING = "record.encoding"  # text that is not UTF-8, or spells half a character
    RECORD_PARSE = "record.parse"  # a line or member is not JSON
    RECORD_FORM = "record.form"  # a record lacks a field, or a field has the wrong type
    RECORD_CONFLICT = "record.conflict"  # two statements of one thing that disagree
    TAR_UNSAFE_MEMBER = "tar.unsafe_member"  # a link, a device, or a name that leaves the archive
    TAR_INCOMPLETE = "tar.incomplete"  # a key without text, or members that come twice
    ID_UNSAFE = "id.unsafe"  # empty, too long, a path out of a folder, or with control characters
    ID_DUPLICATE = "id.duplicate"  # the same id with the same content came before
    SAMPLE_DUPLICATE = "sample.duplicate"  # the same images with the same text came before (data.duplicates=drop)
    SAMPLE_EXCLUDED = "sample.excluded"  # the file that data.exclude names has its id
    CONV_ROLES = "conv.roles"  # turns do not alternate human, gpt
    CONV_IMAGE_COUNT = "conv.image_count"  # <image> marks and images differ in number, or a system text has one
    CONV_NO_MEDIA = "conv.no_media"  # a caption without an image, or <video> or <audio> without a file
    CONV_LABELS = "conv.labels"  # a key that changes what is a label, such as a weight of the record, which is not read
    CONV_OBJECTS = "conv.objects"  # <bbox> and <ref-object> marks that differ from `objects`, or a box out of its image
    CONV_TEMPLATE = "conv.template"  # the chat template does not allow or changes the conversation
    CONV_TOO_LONG = "conv.too_long"  # more tokens than data.sequence_length
    CONV_TOO_MANY_IMAGES = "conv.too_many_images"  # more images than data.max_images_per_sequence
    PAIR_INCOMPLETE = "pair.incomplete"  # no rejected answer beside the last one, or the same (train.objective dpo)
    TEXT_EMPTY = "text.empty"  # no turns, or an empty question or answer
    TEXT_SPECIAL_TOKEN = "text.special_token"  # the text spells one of the tokenizer's control tokens
    TEXT_NO_TOKENS = "text.no_tokens"  # a text of which the tokenizer knows no character
    REF_MISSING = "ref.missing"  # the image file does not exist or cannot be read
    REF_UNSAFE_CHARACTERS = "ref.unsafe_characters"  # control characters or marks of direction in an image's name
    REF_UNSAFE_PATH = "ref.unsafe_path"  # the image path leaves data.image_folder
    MEDIA_UNREADABLE = "media.unreadable"  # a document or a video that is damaged, or a video without frames
    MEDIA_MISSING_PART = "media.missing_part"  # a page after the last one, a time after the end, or a second frame
    IMAGE_EMPTY = "image.empty"  # zero bytes
    IMAGE_UNIDENTIFIED = "image.unidentified"  # none of the allowed formats, whatever its name
    IMAGE_TOO_LARGE = "image.too_large"  # more pixels than data.max_image_pixels, or bytes than data.max_image_bytes
    IMAGE_TOO_SMALL = "image.too_small"  # a side shorter than data.min_image_side
    IMAGE_ASPECT = "image.aspect"  # longer for its width, or the other way round, than data.max_image_aspect
    IMAGE_ANIMATED = "image.animated"  # several frames (data.animated=reject)
    IMAGE_TRUNCATED = "image.truncated"  # the file ends too early
    IMAGE_DECODE_ERROR = "image.decode_error"  # the file is damaged
    IMAGE_MODE = (
        "image.mode"  # pixels without a known range: floating point, 32-bit integers, or other grey than data.grey_bits
    )


ASKED_FOR = frozenset({RejectCode.SAMPLE_DUPLICATE, RejectCode.SAMPLE_EXCLUDED})
"""Codes of samples that the run file asks to drop. They do not count against data.max_reject_fraction."""


class Repair(StrEnum):
    """A change to an accepted sample. Counted in `rejects_summary.json`."""

    EXIF_TRANSPOSED = "exif_transposed"  # turned by its EXIF orientation
    METADATA_STRIPPED = "metadata_stripped"  # place, camera and comments removed
    MODE_CONVERTED = "mode_converted"  # converted to RGB; transparency over white
    BIT_DEPTH_SCALED = "bit_depth_scaled"  # 16-bit grey scaled to 8 bits
    FIRST_FRAME = "first_frame"  # first frame of an animation
    FORMAT_CONVERTED = "format_converted"  # stored as PNG instead of GIF, BMP or TIFF
    EXTENSION_MISMATCH = "extension_mismatch"  # the name promises another format than the bytes hold
    TURNS_DROPPED = "turns_dropped"  # turns dropped to fit sequence_length (data.overlong_policy=truncate or split)
    TURNS_SPLIT = "turns_split"  # last turns made further samples (data.overlong_policy=split)
    CHARACTERS_LOST = "characters_lost"  # characters of the text that the tokenizer does not know
    ID_SUFFIXED = "id_suffixed"  # the id was taken by other content; a suffix tells them apart


class RejectedError(Exception):
    """Raised by a check; becomes a line of `rejects.jsonl`."""

    def __init__(self, code: RejectCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Reject:
    """One rejected sample."""

    where: str
    id: str
    code: RejectCode
    message: str
    image: ImageRef | None = None  # its first image, for people

    def sentence(self) -> str:
        """One printable line for people."""
        return f"{_line(self.where)}: {self.code}: {_line(self.message)}"


class Ledger:
    """Counts records read, accepted and rejected; `summary` asserts that accepted + rejected == read.

    Writes rejects to `lines` as JSON lines and keeps a few of each code as examples.
    """

    def __init__(self, max_reject_fraction: float, lines: TextIO) -> None:
        self.max_reject_fraction = max_reject_fraction
        self.read = self.accepted = self.repaired = self.rejected = 0
        self.repairs: Counter[Repair] = Counter()
        self.examples: dict[RejectCode, list[Reject]] = {}
        self._by_code: Counter[RejectCode] = Counter()
        self._lines = lines

    def counting(self, records: Iterable[T]) -> Iterator[T]:
        """The records unchanged, each counted as read."""
        for record in records:
            self.read += 1
            yield record

    def reject(self, reject: Reject) -> None:
        self.rejected += 1
        self._by_code[reject.code] += 1
        examples = self.examples.setdefault(reject.code, [])
        if len(examples) < EXAMPLES_PER_CODE:
            examples.append(reject)
        line = {
            "where": _line(reject.where), "id": _line(reject.id), "code": reject.code, "message": _line(reject.message)
        }  # fmt: skip
        self._lines.write(json.dumps(line) + "\n")

    def accept(self, repairs: Iterable[Repair]) -> None:
        kinds = set(repairs)
        self.accepted += 1
        self.repaired += bool(kinds)
        self.repairs.update(kinds)

    def add_accepted(self, accepted: int, repaired: int, repairs: Mapping[str, int]) -> None:
        """Add samples that another ledger has read and accepted."""
        self.read += accepted
        self.accepted += accepted
        self.repaired += repaired
        self.repairs.update({Repair(name): count for name, count in repairs.items()})

    def summary(self) -> dict[str, Any]:
        """Counts, codes by number of rejects, and the places of the first few of each code."""
        assert self.read == self.accepted + self.rejected, "a sample was lost or counted twice"
        return {
            "read": self.read,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "repaired": self.repaired,
            "by_code": dict(self._by_code.most_common()),
            "repairs": dict(self.repairs.most_common()),
            "examples": {
                code: [f"{_line(reject.where)}: {_line(reject.message)}" for reject in rejects]
                for code, rejects in self.examples.items()
            },
            "max_reject_fraction": self.max_reject_fraction,
        }

    def check(self, listed: str = IN_THE_RUN) -> None:
        """Raise DataError when a larger share than allowed was rejected. `listed`: where people find all rejects."""
        summary = self.summary()
        faults = {code: count for code, count in summary["by_code"].items() if code not in ASKED_FOR}
        bad = sum(faults.values())
        if not bad or bad <= self.max_reject_fraction * self.read:
            return
        counts = ", ".join(f"{code} {count}" for code, count in faults.items())
        lines = [f"{bad} of {self.read} samples cannot be used: {counts}"]
        for code, count in list(faults.items())[:5]:
            lines += [f"  {code} ({count}), for example", *(f"    {text}" for text in summary["examples"][code])]
        raise DataError(
            "\n".join(lines),
            expected=f"at most {self.max_reject_fraction:.1%} rejected (data.max_reject_fraction)",
            fix=f"correct the samples, which {listed} lists "
            "(vlmpipe docs data-formats explains each code), or allow a larger share",
        )


def _line(message: str) -> str:
    """One printable line, without the data's control characters."""
    line = one_line(message)
    return line if len(line) <= MESSAGE_CHARS else line[: MESSAGE_CHARS - 3] + "..."


def rejected_for_tiles(by_code: Mapping[str, int], examples: Mapping[str, Iterable[str]]) -> list[str]:
    """A sentence about prepared data in which an earlier version rejected samples that are taken now; none elsewhere.

    by_code, examples: of the data's `SUMMARY`. Its fingerprint did not change with the rule, so that runs continue.
    """
    code = RejectCode.CONV_TOO_MANY_IMAGES
    if not any(OF_TILES.search(example) for example in examples.get(code, ())):
        return []
    return [
        f"{by_code[code]:,} samples were rejected for too many images by an earlier version, which counted tiles: set "
        "data.max_images_per_sequence to another number to prepare the data by images"
    ]
