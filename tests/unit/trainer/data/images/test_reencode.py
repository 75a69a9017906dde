"""Images that are turned stay as small and as sharp as their files were."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, JpegImagePlugin

from tests.support.data.prepared import encode
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.images.reencode import SIDEWAYS
from vlmpipe.trainer.data.prepare.validation.checks import CheckedImage, check_image
from vlmpipe.trainer.data.rejects import Repair

CONFIG = DataConfig(source="unused.jsonl", sequence_length=100)
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
MIN_PSNR_DB = 45.0  # of the stored pixels beside those that the file shows


def scene(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Smooth shapes and some grain, as photographs have."""
    random = np.random.default_rng(0)
    sizes = [(width // step + 2, height // step + 2) for step in (4, 32)]
    layers = [
        np.asarray(
            Image.fromarray(random.integers(0, 256, (h, w, 3), dtype=np.uint8)).resize((width, height)), dtype=float
        )
        for w, h in sizes
    ]
    return Image.fromarray((0.2 * layers[0] + 0.8 * layers[1]).astype(np.uint8)).convert(mode)


def oriented(image: Image.Image, orientation: object, image_format: str = "JPEG", **options: object) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, image_format, exif=exif, **options)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def psnr_db(checked: CheckedImage, data: bytes, orientation: int) -> float:
    """Peak signal-to-noise ratio of the stored pixels to those that the file shows; infinite where they are equal."""
    shown = np.asarray(opened(data).transpose(TURNS[orientation]), dtype=float)
    error = np.square(np.asarray(opened(checked.data), dtype=float) - shown).mean()
    return float(10 * np.log10(255**2 / error)) if error else float("inf")


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("quality", [60, 90])
def test_a_turned_jpeg_is_as_large_as_its_file(orientation: int, subsampling: int, quality: int) -> None:
    data = oriented(scene(320, 192), orientation, quality=quality, subsampling=subsampling)
    checked = check_image(data, CONFIG)
    assert checked.repairs == (Repair.EXIF_TRANSPOSED,) and checked.extension == "jpg"
    is_widened = subsampling == 1 and orientation in SIDEWAYS  # half widths cannot become half heights
    assert len(checked.data) < (1.45 if is_widened else 1.03) * len(data)
    assert psnr_db(checked, data, orientation) > (40.0 if is_widened else MIN_PSNR_DB)
    assert not opened(checked.data).getexif()


@pytest.mark.parametrize("size", [(317, 191), (24, 9)])
def test_sides_that_are_no_whole_blocks_cost_little(size: tuple[int, int]) -> None:
    data = oriented(scene(*size), 6, quality=85)
    checked = check_image(data, CONFIG)
    assert len(checked.data) < 1.1 * len(data) and psnr_db(checked, data, 6) > 36.0


def test_a_grey_jpeg_stays_grey() -> None:
    data = oriented(scene(320, 192, "L"), 8, quality=85)
    checked = check_image(data, CONFIG)
    assert opened(checked.data).mode == "L" and len(checked.data) < 1.03 * len(data)
    assert psnr_db(checked, data, 8) > MIN_PSNR_DB


def test_each_layer_keeps_its_table() -> None:
    steps = [[number + 1 + 3 * place for place in range(64)] for number in (1, 2)]
    data = oriented(scene(64, 32), 5, qtables=steps)
    stored = opened(check_image(data, CONFIG).data)
    assert isinstance(stored, JpegImagePlugin.JpegImageFile)
    turned = [[table[8 * column + row] for row in range(8) for column in range(8)] for table in steps]
    assert [list(stored.quantization[number]) for number in (0, 1)] == turned


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_a_number_without_a_meaning_turns_nothing(orientation: int) -> None:
    data = oriented(scene(64, 32), orientation)
    checked = check_image(data, CONFIG)
    assert checked.repairs == (Repair.METADATA_STRIPPED,)
    np.testing.assert_array_equal(np.asarray(opened(checked.data)), np.asarray(opened(data)))


def test_colours_keep_their_profile() -> None:
    data = oriented(scene(64, 32), 6, icc_profile=b"a profile of colours")
    assert opened(check_image(data, CONFIG).data).info["icc_profile"] == b"a profile of colours"


@pytest.mark.parametrize("lossless", [True, False])
def test_a_turned_webp_stays_webp(lossless: bool) -> None:
    data = oriented(scene(320, 192), 6, "WEBP", lossless=lossless, quality=90)
    checked = check_image(data, CONFIG)
    assert checked.extension == "webp" and checked.repairs == (Repair.EXIF_TRANSPOSED,)
    assert len(checked.data) < (1.2 if lossless else 2.0) * len(data)
    assert psnr_db(checked, data, 6) == float("inf") if lossless else psnr_db(checked, data, 6) > 36.0


@pytest.mark.parametrize("lossless", [True, False])
def test_a_webp_of_several_frames_or_with_transparency_stays_webp(lossless: bool) -> None:
    frames = [scene(320, 192, "RGBA"), scene(320, 192, "RGBA").rotate(180)]
    first = encode(frames[0], "WEBP", lossless=lossless, quality=90)
    moving = encode(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=lossless, quality=90)
    for data in (first, moving):
        checked = check_image(data, CONFIG)
        assert checked.extension == "webp" and len(checked.data) < 2 * len(first)
        assert not getattr(opened(checked.data), "is_animated", False)
        found, shown = (np.asarray(opened(one).convert("RGB"), dtype=int) for one in (checked.data, first))
        assert np.abs(found - shown).max() <= (0 if lossless else 24)
