"""Nothing that identifies a person stays in a stored image, whatever its kind of file and however it is broken."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from tests.support.data.prepared import encode, picture
from tests.support.fuzz import fuzzed
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.images.strip_exif import damaged_chunk, without_metadata
from vlmpipe.trainer.data.prepare.validation.checks import CheckedImage, check_image
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.models.video_file import joined

CONFIG = DataConfig(source="builtin:digits", sequence_length=100, max_image_pixels=10_000, min_image_side=1)
OWNER = b"camera-of-somebody"
TEXT = OWNER.decode()


def exif() -> Image.Exif:
    made = Image.Exif()
    made[0x010F] = TEXT
    made.get_ifd(0x8825).update({1: "N", 2: (48.0, 51.0, 30.0)})
    return made


def texts() -> PngInfo:
    made = PngInfo()
    made.add_text("Comment", TEXT)
    made.add_itxt("XML:com.adobe.xmp", TEXT)
    made.add_text("Author", TEXT, zip=True)
    made.add(b"prVt", OWNER, after_idat=True)
    return made


def tags() -> ImageFileDirectory_v2:
    made = ImageFileDirectory_v2()
    made[270] = TEXT
    return made


OPTIONS: dict[str, dict[str, Any]] = {
    "JPEG": {"exif": exif(), "comment": OWNER, "xmp": OWNER},
    "MPO": {"exif": exif(), "save_all": True, "append_images": [picture(2)]},
    "PNG": {"exif": exif(), "pnginfo": texts()},
    "WEBP": {"exif": exif(), "xmp": OWNER, "lossless": True},
    "TIFF": {"exif": exif(), "tiffinfo": tags()},
    "GIF": {"comment": OWNER},
    "BMP": {},
}
MODES = {"JPEG": ("L", "RGB", "CMYK"), "MPO": ("RGB",), "BMP": ("RGB",), "GIF": ("P",)}
KINDS = [(kind, mode) for kind in OPTIONS for mode in MODES.get(kind, ("L", "RGB", "RGBA"))]
EXTRA = [
    ("JPEG", {"progressive": True}),
    ("JPEG", {"restart_marker_rows": 1}),
    ("WEBP", {"lossless": False, "quality": 80}),
]
FILES = [encode(picture(mode=mode), kind, **OPTIONS[kind]) for kind, mode in KINDS]
FILES += [encode(picture(), kind, **(OPTIONS[kind] | options)) for kind, options in EXTRA]


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", 2 + len(content)) + content


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def check(data: bytes) -> CheckedImage | None:
    try:
        return check_image(data, CONFIG)
    except RejectedError:
        return None


def require_clean(checked: CheckedImage) -> None:
    image = Image.open(io.BytesIO(checked.data))
    assert OWNER not in checked.data and not image.getexif() and not {"comment", "xmp", "photoshop"} & image.info.keys()
    assert without_metadata(checked.data) == checked.data, "what is stored has nothing more to remove"
    assert checked.data.endswith((b"\xff\xd9", b"IEND\xaeB`\x82")) or checked.extension == "webp"


@pytest.mark.parametrize("data", FILES, ids=[*map("-".join, KINDS), *(kind for kind, _ in EXTRA)])
def test_every_kind_of_file_that_pillow_writes_is_stored_without_metadata(data: bytes) -> None:
    checked = check(data)
    assert checked is not None
    require_clean(checked)


@pytest.mark.parametrize("marker", [*range(0xE0, 0xF0), 0xFE])
def test_application_data_of_every_kind_is_removed(marker: int) -> None:
    plain = encode(picture(), "JPEG")
    for content in (OWNER, b"JFXX\0\x13" + OWNER, b"FPXR\0" + OWNER, b"MPF\0" + OWNER, b"JP" + OWNER):
        checked = check(plain[:2] + segment(marker, content) + plain[2:])
        assert checked is not None
        require_clean(checked)


def test_a_thumbnail_and_what_follows_the_end_are_removed() -> None:
    plain = encode(picture(), "JPEG")
    length = struct.unpack(">H", plain[4:6])[0]
    assert plain[6:11] == b"JFIF\0" and length == 16
    thumbnail = segment(0xE0, plain[6:18] + bytes([2, 3]) + OWNER)  # 2 x 3 pixels of 3 bytes
    for data in (
        plain[:2] + thumbnail + plain[4 + length :],
        plain + OWNER,
        plain + encode(picture(), "JPEG", exif=exif()),
    ):
        checked = check(data)
        assert checked is not None and checked.data == plain


@pytest.mark.parametrize("broken", ["no IEND", "IEND with content", "cut behind the pixels", "trailing"])
def test_a_png_that_does_not_end_as_it_should_is_stored_clean(broken: str) -> None:
    data = encode(picture(), "PNG", exif=exif(), pnginfo=texts())
    end = chunk(b"IEND", b"")
    data = {
        "no IEND": data.removesuffix(end), "IEND with content": data.removesuffix(end) + chunk(b"IEND", OWNER),
        "cut behind the pixels": data.removesuffix(end) + bytes(5), "trailing": data + OWNER,
    }[broken]  # fmt: skip
    checked = check(data)
    assert checked is not None
    require_clean(checked)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(checked.data))), np.asarray(picture()))


@fuzzed(300, share=10)
@given(
    data=st.sampled_from(FILES),
    place=st.floats(0, 1, exclude_max=True),
    inserted=st.binary(max_size=6) | st.sampled_from([b"\xff", b"\0", b"\xff\xff", b"\xff\xd8", b"\xff\xd9", b"IEND"]),
    removed=st.integers(0, 6),
)
def test_no_mutation_makes_metadata_stay(data: bytes, place: float, inserted: bytes, removed: int) -> None:
    at = int(place * len(data))
    checked = check(data[:at] + inserted + data[at + removed :])
    event("stored without metadata" if checked else "rejected")
    if checked is not None:
        require_clean(checked)


def test_every_flip_in_a_png_is_noticed_or_changes_nothing() -> None:
    """Pillow passes over the checksums of pixels, in which one flip of twelve goes unnoticed."""
    data = encode(Image.new("L", (20, 20), 128), "PNG")
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        if checked := check(bytes(flipped)):
            np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(checked.data))), pixels)


def test_the_damaged_chunk_is_named() -> None:
    data = encode(picture(), "PNG")
    place = data.index(b"IDAT") + 40
    damaged = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    assert (damaged_chunk(data), damaged_chunk(damaged), damaged_chunk(b"\xff\xd8")) == ("", "IDAT", "")
    with pytest.raises(RejectedError, match="the bytes of its IDAT have another checksum") as refused:
        check_image(damaged, CONFIG)
    assert refused.value.code == RejectCode.IMAGE_DECODE_ERROR


@pytest.mark.parametrize("fill", [b"", b"\xff", b"\xff\xff\xff"])
def test_no_prepared_image_has_the_mark_of_a_video(fill: bytes) -> None:
    """As when the shards of one run are the source of another, or somebody wrote the mark by hand."""
    clip = joined([encode(picture(seed), "JPEG") for seed in range(4)])
    marked = clip[: 4 + struct.unpack(">H", clip[4:6])[0]] + fill + clip[4 + struct.unpack(">H", clip[4:6])[0] :]
    checked = check(marked)
    assert checked is not None and b"video frames" not in checked.data
    require_clean(checked)
