"""JPEGs that are kept are decoded as small copies: the same damage is found, and the same signatures and sizes."""

from __future__ import annotations

import io
import random
import struct

import numpy as np
import pytest
from PIL import Image

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.near_duplicates.search import as_signatures
from vlmpipe.trainer.data.near_duplicates.signature import MAX_HASH_DISTANCE, MIN_COPY_SIDE, hash_distance
from vlmpipe.trainer.data.prepare.validation.checks import check_image
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError

CONFIG = DataConfig(source="builtin:digits", sequence_length=100)
SETTINGS = {
    "baseline": {},
    "progressive": {"progressive": True},
    "full colour": {"subsampling": 0},
    "restart intervals": {"restart_marker_blocks": 4},
}


def photo(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    cells = np.random.default_rng(1).integers(0, 255, (12, 16, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize(size, Image.Resampling.BICUBIC).convert(mode)


def written(image: Image.Image, kind: str, **settings: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


def decodes(data: bytes) -> bool:
    """Whether all pixels do, as training needs them."""
    try:
        Image.open(io.BytesIO(data)).load()
    except (OSError, SyntaxError, ValueError):
        return False
    return True


def is_kept(data: bytes) -> bool:
    try:
        return bool(check_image(data, CONFIG).data)
    except RejectedError:
        return False


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_what_is_kept_decodes_whole_and_what_is_refused_does_not(kind: str, mode: str) -> None:
    whole = written(photo((260, 200), mode), "JPEG", quality=90, **SETTINGS[kind])
    chosen, kept = random.Random(0), 0
    for _ in range(40):
        cut = chosen.random() < 0.5
        damaged = bytearray(whole[: chosen.randrange(len(whole) // 2, len(whole))] if cut else whole)
        for _ in range(chosen.randrange(3)):
            damaged[chosen.randrange(len(damaged))] = chosen.randrange(256)
        data = bytes(damaged)
        kept += is_kept(data)
        assert decodes(data) or not is_kept(data), "an image is kept that training cannot decode"
    assert 10 < kept < 30, "both are tried"


@pytest.mark.parametrize("size", [(60, 40), (130, 128), (427, 640), (777, 531)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_small_copy_has_the_size_and_the_signature_of_the_image(size: tuple[int, int], mode: str) -> None:
    image = photo(size, mode)
    small, whole = (check_image(data, CONFIG) for data in (written(image, "JPEG", quality=95), written(image, "PNG")))
    assert (small.width, small.height) == (whole.width, whole.height) == size
    pair = as_signatures([small.signature]), as_signatures([whole.signature])
    assert hash_distance(*pair)[0] <= MAX_HASH_DISTANCE // 2


def test_the_copy_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a signature takes half as long as decoding."""
    seen: list[tuple[int, int]] = []
    resize = Image.Image.resize

    def noted(image: Image.Image, *more: object) -> Image.Image:
        seen.append(image.size)
        return resize(image, *more)  # type: ignore[arg-type]

    data = written(photo((1280, 960)), "JPEG")
    monkeypatch.setattr(Image.Image, "resize", noted)
    check_image(data, CONFIG)
    assert seen == [(1280 // 8, 960 // 8)] and min(seen[0]) >= MIN_COPY_SIDE


@pytest.mark.parametrize("exif", [b"no TIFF file", b"II*\0", b"II+\0\x08\0\0\0\x01\0"])
def test_an_unreadable_exif_costs_its_image_only(exif: bytes) -> None:
    """Pillow reads it where the file is opened only if JFIF's header has no resolution."""
    whole, segment = written(photo((260, 200)), "JPEG", dpi=(72, 72)), b"Exif\0\0" + exif
    data = whole[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + whole[2:]
    with pytest.raises(RejectedError, match="does not decode") as refused:
        check_image(data, CONFIG)
    assert refused.value.code == RejectCode.IMAGE_DECODE_ERROR
