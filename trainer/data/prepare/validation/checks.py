"""Checks of a sample's images and texts. Each raises RejectedError with its code, or passes."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.images.decoding import BYTES_A_PIXEL, DECODING
from vlmpipe.trainer.data.images.reencode import reencoded
from vlmpipe.trainer.data.images.strip_exif import damaged_chunk, without_metadata
from vlmpipe.trainer.data.near_duplicates.signature import MIN_COPY_SIDE, Box, image_signature
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError, Repair
from vlmpipe.trainer.data.sample import EXTENSIONS, IMAGE_SUFFIXES, Clip, Turn
from vlmpipe.trainer.sizing.image_grids import VideoSize
from vlmpipe.trainer.storage.regular_files import STAND_IN_BYTES, stand_in_of

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# Formats that are stored unconverted. MPO is a JPEG with further images after the first.
KEPT_EXTENSION = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
FULL_GREY_BITS, DARK = (
    16,
    1 << 12,
)  # an image of 16 bits without a value above 4,095 is one of 12 bits, and would be black
ORIENTATION_TAG, UPRIGHT = 0x0112, 1
DECODE_ERRORS = (  # what Pillow's codecs raise
    OSError, SyntaxError, ValueError, EOFError, TypeError, LookupError, struct.error, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """An image that decodes, upright, in mode L or RGB with 8 bits per channel."""

    data: bytes
    extension: str  # jpg | png | webp
    width: int
    height: int
    sha256: str  # of `data`
    repairs: tuple[Repair, ...]
    signature: bytes = b""  # `image_signature`; none of a video
    clip: Clip | None = None  # of a video: `data` joins its frames, and the size is a frame's

    @property
    def size(self) -> tuple[int, int]:
        """Arguments of `ImageForm`: (width, height) in pixels."""
        if self.clip is None:
            return self.width, self.height
        return VideoSize(self.width, self.height, self.clip.patches, self.clip.patch_s)


def check_clip(data: bytes, clip: Clip, config: DataConfig) -> CheckedImage:
    """Check the size of a video's frames, which were decoded just now. Raises RejectedError."""
    image = _open(data)
    _check_size(image, config)
    return CheckedImage(data, "jpg", image.width, image.height, hashlib.sha256(data).hexdigest(), (), clip=clip)


def check_image(data: bytes, config: DataConfig, *, name: str = "") -> CheckedImage:
    """Decode the image; keep its encoded pixels if nothing needs repair, else re-encode it.

    `name`: the file's name, whose extension is compared with the format. Raises RejectedError.
    """
    image = _open(data)
    _check_size(image, config)
    if chunk := damaged_chunk(data):
        raise RejectedError(
            RejectCode.IMAGE_DECODE_ERROR, f"the bytes of its {chunk} have another checksum than it says"
        )
    with DECODING.holding(image.width * image.height * BYTES_A_PIXEL):
        return _checked(image, data, config, name)


def _checked(image: Image.Image, data: bytes, config: DataConfig, name: str) -> CheckedImage:
    file_format = str(image.format)
    repairs = []
    suffix = "." + name.rpartition(".")[2].lower()
    if suffix in IMAGE_SUFFIXES and suffix not in EXTENSIONS[file_format]:
        repairs.append(Repair.EXTENSION_MISMATCH)
    changed, original, orientation = [], image, UPRIGHT
    stripped, size = without_metadata(data), image.size
    if file_format not in KEPT_EXTENSION:
        changed.append(Repair.FORMAT_CONVERTED)
    try:
        reduced = _reduced(image) if stripped is not None else None
        if file_format != "MPO" and getattr(image, "is_animated", False):
            if config.animated == "reject":
                raise RejectedError(RejectCode.IMAGE_ANIMATED, f"{file_format} with several frames")
            changed.append(Repair.FIRST_FRAME)
        image.load()
        if not reduced and (orientation := _orientation(image)) != UPRIGHT:
            image = ImageOps.exif_transpose(image)
            changed.append(Repair.EXIF_TRANSPOSED)
        if image.mode not in ("L", "RGB") or image.has_transparency_data:
            image, repair = _eight_bit_colour(image, config.grey_bits)
            changed.append(repair)
    except DECODE_ERRORS as error:
        code = RejectCode.IMAGE_TRUNCATED if "truncated" in str(error) else RejectCode.IMAGE_DECODE_ERROR
        raise RejectedError(code, f"{file_format} does not decode: {error}") from error
    extension = KEPT_EXTENSION.get(file_format, "png")
    if changed or stripped is None:
        changed = changed or [Repair.METADATA_STRIPPED]
        data, extension = _encoded(image, original, data, orientation if len(changed) == 1 else UPRIGHT)
    elif stripped != data:
        data = stripped
        changed.append(Repair.METADATA_STRIPPED)
    sha256, all_repairs = hashlib.sha256(data).hexdigest(), (*repairs, *changed)
    width, height = size if reduced else image.size
    return CheckedImage(data, extension, width, height, sha256, all_repairs, image_signature(image, reduced))


def _reduced(image: Image.Image) -> Box | None:
    """Let a JPEG that is stored as it is be decoded as a small copy. Returns the copy's edges; None of other images.

    libjpeg reads all of the file for a small copy too, so that it finds the same damage, in less time.
    """
    if KEPT_EXTENSION.get(str(image.format)) != "jpg" or image.mode not in ("L", "RGB"):
        return None
    if _orientation(image) != UPRIGHT:
        return None
    reduced = image.draft(None, (MIN_COPY_SIDE, MIN_COPY_SIDE))
    return reduced[1] if reduced else None


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; UPRIGHT for none and for a number without a meaning, such as 0."""
    orientation = image.getexif().get(ORIENTATION_TAG)
    return orientation if isinstance(orientation, int) and orientation in range(1, 9) else UPRIGHT


def _encoded(image: Image.Image, original: Image.Image, data: bytes, orientation: int) -> tuple[bytes, str]:
    """A changed image as a file and its extension.

    Pillow writes comments and texts that it has read, so they are removed again.
    """
    written, extension = reencoded(image, original, data, orientation)
    encoded = without_metadata(written)
    assert encoded is not None
    return encoded, extension


def _open(data: bytes) -> Image.Image:
    """Read the header only, which has the size."""
    if not data:
        raise RejectedError(RejectCode.IMAGE_EMPTY, "the image has zero bytes")
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise RejectedError(RejectCode.IMAGE_TOO_LARGE, str(error)) from error
    except UnidentifiedImageError as error:
        start = data[:16].decode("latin-1")
        stand_in = stand_in_of(data[:STAND_IN_BYTES])
        is_what = f"the file is {stand_in[0]} ({stand_in[1]})" if stand_in else f"the file starts with {start!r}"
        message = f"none of {', '.join(FORMATS)}; {is_what}"
        raise RejectedError(RejectCode.IMAGE_UNIDENTIFIED, message) from error
    except DECODE_ERRORS as error:
        raise RejectedError(RejectCode.IMAGE_DECODE_ERROR, f"the header does not decode: {error}") from error


def _check_size(image: Image.Image, config: DataConfig) -> None:
    size = f"{image.width} x {image.height} pixels"
    shorter, longer = sorted(image.size)
    if image.width * image.height > config.max_image_pixels:
        message = f"{size}, more than data.max_image_pixels {config.max_image_pixels}"
        raise RejectedError(RejectCode.IMAGE_TOO_LARGE, message)
    if shorter < config.min_image_side:
        message = f"{size}, a side below data.min_image_side {config.min_image_side}"
        raise RejectedError(RejectCode.IMAGE_TOO_SMALL, message)
    if longer > config.max_image_aspect * shorter:
        message = f"{size}, a ratio above data.max_image_aspect {config.max_image_aspect:g}"
        raise RejectedError(RejectCode.IMAGE_ASPECT, message)


def _eight_bit_colour(image: Image.Image, grey_bits: int) -> tuple[Image.Image, Repair]:
    if image.mode.startswith("I;16"):
        values = np.asarray(image)
        highest = int(values.max(initial=0))
        if highest >= 1 << grey_bits or (grey_bits == FULL_GREY_BITS and highest < DARK):
            message = f"16-bit grey with values up to {highest}: data.grey_bits {grey_bits} is not what they use"
            raise RejectedError(RejectCode.IMAGE_MODE, message)
        # convert("RGB") would clip at 255 instead of scaling.
        return Image.fromarray((values >> (grey_bits - 8)).astype(np.uint8)), Repair.BIT_DEPTH_SCALED
    if image.mode in ("I", "F"):
        raise RejectedError(RejectCode.IMAGE_MODE, f"mode {image.mode} has no known range; save it as 8 or 16 bit")
    if image.mode == "La":  # greys with alpha already multiplied, which converts to nothing else
        image = image.convert("LA")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB"), Repair.MODE_CONVERTED


def check_turns(turns: tuple[Turn, ...], num_images: int, control_tokens: Sequence[str]) -> None:
    """Texts are not empty and have no control tokens, and as many `<image>` marks as there are images."""
    if not turns:
        raise RejectedError(RejectCode.TEXT_EMPTY, "the conversation has no turns")
    if all(turn.is_context for turn in turns):
        raise RejectedError(RejectCode.CONV_LABELS, "no answer is learned: each has a weight of 0, or loss false")
    for number, turn in enumerate(turns, 1):
        is_asked, is_answered = turn.question.strip() or turn.results, turn.answer.strip() or turn.calls
        if not is_asked or not is_answered:
            part = "answer" if is_asked else "question"
            raise RejectedError(RejectCode.TEXT_EMPTY, f"turn {number} has an empty {part}")
        texts = turn.texts()
        for token in control_tokens:
            if any(token in text for text in texts):
                raise RejectedError(RejectCode.TEXT_SPECIAL_TOKEN, f"turn {number} spells the control token {token!r}")
        if len(texts) == 2:  # a question and an answer
            continue
        places: dict[str, tuple[str, ...]] = {"system text": (turn.system,), "thinking": (turn.thinking,)}
        if turn.has_tools:
            places |= {"tools or calls": (turn.tools, turn.calls), "result of a tool": turn.results}
        if part := next((part for part, texts in places.items() if any(IMAGE_TOKEN in text for text in texts)), ""):
            raise RejectedError(RejectCode.CONV_IMAGE_COUNT, f"turn {number} has {IMAGE_TOKEN} in its {part}")
    marks = sum((turn.question + turn.answer).count(IMAGE_TOKEN) for turn in turns)
    if marks != num_images:
        message = f"{marks} {IMAGE_TOKEN} marks for {num_images} images"
        raise RejectedError(RejectCode.CONV_IMAGE_COUNT, message)
