"""Image checks: what is kept, what is repaired, what is refused. Every file is made here."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo

from tests.support.data.prepared import corrupt, encode, picture, png
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.images.strip_exif import without_metadata
from vlmpipe.trainer.data.prepare.validation.checks import CheckedImage, _eight_bit_colour, check_image
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError, Repair


def check(data: bytes, *, name: str = "", **limits: Any) -> CheckedImage:
    config = DataConfig(source="builtin:digits", sequence_length=100, **{"max_image_pixels": 10_000} | limits)
    return check_image(data, config, name=name)


def stored(checked: CheckedImage) -> Image.Image:
    image = Image.open(io.BytesIO(checked.data))
    image.load()
    assert (image.width, image.height) == (checked.width, checked.height)
    assert checked.sha256 == hashlib.sha256(checked.data).hexdigest()
    return image


@pytest.mark.parametrize(
    ("data", "extension"),
    [
        (png(), "png"),
        (png(mode="L"), "png"),
        (encode(picture(), "JPEG"), "jpg"),
        (encode(picture(mode="L"), "JPEG"), "jpg"),
    ],
)
def test_good_images_are_stored_unchanged(data: bytes, extension: str) -> None:
    checked = check(data)
    assert (checked.data, checked.extension, checked.repairs) == (data, extension, ())
    assert stored(checked).mode in ("L", "RGB")


@pytest.mark.parametrize("mode", ["1", "P", "LA", "RGBA"])
def test_other_modes_become_rgb(mode: str) -> None:
    checked = check(png(mode=mode))
    assert checked.repairs == (Repair.MODE_CONVERTED,)
    assert stored(checked).mode == "RGB"


def test_a_cmyk_jpeg_becomes_rgb() -> None:
    checked = check(encode(picture(mode="CMYK"), "JPEG"))
    assert (checked.repairs, checked.extension) == ((Repair.MODE_CONVERTED,), "jpg")
    assert stored(checked).mode == "RGB"


def test_transparency_shows_white() -> None:
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    image.putpixel((0, 0), (255, 0, 0, 255))
    colours = stored(check(encode(image)))
    assert colours.getpixel((0, 0)) == (255, 0, 0)
    assert colours.getpixel((1, 1)) == (255, 255, 255)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    checked = check(encode(Image.fromarray(values)))
    assert checked.repairs == (Repair.BIT_DEPTH_SCALED,)
    np.testing.assert_array_equal(np.asarray(stored(checked)), values // 256)


def test_exif_orientation_is_applied() -> None:
    image = Image.new("RGB", (48, 32), "black")
    image.paste("white", (0, 0, 24, 32))  # left half
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise: the left half comes on top
    checked = check(encode(image, "JPEG", exif=exif))
    turned = stored(checked)
    assert checked.repairs == (Repair.EXIF_TRANSPOSED,)
    assert turned.size == (32, 48)
    assert turned.getpixel((16, 4))[0] > 200 and turned.getpixel((16, 44))[0] < 50
    assert not turned.getexif()


@pytest.mark.parametrize("image_format", ["GIF", "BMP", "TIFF"])
def test_other_formats_are_stored_as_png(image_format: str) -> None:
    checked = check(encode(picture(), image_format))
    assert Repair.FORMAT_CONVERTED in checked.repairs
    assert stored(checked).format == "PNG"


@pytest.mark.parametrize("image_format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_used(image_format: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    data = encode(frames[0], image_format, save_all=True, append_images=frames[1:], lossless=True)
    checked = check(data)
    assert Repair.FIRST_FRAME in checked.repairs
    assert stored(checked).convert("RGB").getpixel((8, 8)) == (255, 0, 0)
    assert not getattr(stored(checked), "is_animated", False)


def test_the_content_and_not_the_name_decides_the_format() -> None:
    checked = check(png(), name="photo.JPG")
    assert checked.repairs == (Repair.EXTENSION_MISMATCH,)
    assert (checked.data, checked.extension) == (png(), "png")
    assert check(png(), name="no-extension").repairs == ()


def _with_metadata() -> list[bytes]:
    """A JPEG and a PNG that say where they were taken; the JPEG has a colour profile too."""
    exif = Image.Exif()
    exif[0x010F] = "camera-of-somebody"
    exif.get_ifd(0x8825)[1] = "N"
    text = PngInfo()
    text.add_text("Comment", "camera-of-somebody")
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return [
        encode(picture(), "JPEG", exif=exif, icc_profile=profile, comment=b"camera-of-somebody"),
        encode(picture(), "PNG", exif=exif, pnginfo=text),
        encode(picture(), "WEBP", exif=exif, lossless=True),
    ]


@pytest.mark.parametrize("data", _with_metadata(), ids=["JPEG", "PNG", "WEBP"])
def test_metadata_is_taken_out_and_pixels_stay(data: bytes) -> None:
    assert b"camera-of-somebody" in data
    checked = check(data)
    image, before = stored(checked), Image.open(io.BytesIO(data))
    assert checked.repairs == (Repair.METADATA_STRIPPED,)
    assert b"camera-of-somebody" not in checked.data and not image.getexif()
    assert image.info.get("icc_profile") == before.info.get("icc_profile")
    np.testing.assert_array_equal(np.asarray(image), np.asarray(before))
    assert check(checked.data).repairs == ()


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe1"]))
def test_stripping_metadata_always_terminates(data: bytes, start: bytes) -> None:
    assert len(without_metadata(start + data) or b"") <= len(start + data)


def _hidden(data: bytes, kind: str) -> bytes:
    """A JPEG whose metadata stands where a simple reader misses it."""
    if kind == "fill bytes before a marker":
        return data[:2] + b"\xff\xff" + data[2:]
    if kind == "another image behind the end":
        return data + data
    if kind == "between scans":
        return data[:-2] + b"\xff\xfe\x00\x14camera-of-somebody" + data[-2:]
    return data[:2] + b"\x00" + data[2:]  # a structure that decoders forgive


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(
    "kind", ["fill bytes before a marker", "another image behind the end", "between scans", "a stray byte"]
)
def test_metadata_is_taken_out_wherever_it_stands(kind: str, progressive: bool) -> None:
    exif = Image.Exif()
    exif[0x010F] = "camera-of-somebody"
    data = _hidden(encode(picture(), "JPEG", exif=exif, progressive=progressive), kind)
    try:
        checked = check(data)
    except RejectedError as error:
        assert kind == "a stray byte" and error.code == RejectCode.IMAGE_UNIDENTIFIED
        return
    assert b"camera-of-somebody" not in checked.data and checked.extension == "jpg"
    before, after = (np.asarray(Image.open(io.BytesIO(one)), np.int16) for one in (data, checked.data))
    assert np.abs(before - after).max() <= (0 if kind != "a stray byte" else 40)


def test_small_files_stay_small() -> None:
    noise = Image.effect_noise((400, 300), 60).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    for image_format, options in (("WEBP", {}), ("JPEG", {"exif": exif})):
        data = encode(noise, image_format, quality=85, **options)
        checked = check(data, max_image_pixels=200_000)
        assert len(checked.data) < 2 * len(data)
        assert stored(checked).size == ((300, 400) if options else (400, 300))


def test_twelve_bits_are_not_taken_for_sixteen() -> None:
    values = np.linspace(0, 4095, 256, dtype=np.uint16).reshape(16, 16)
    with pytest.raises(RejectedError, match=r"values up to 4095: data\.grey_bits 16") as refused:
        check(encode(Image.fromarray(values)))
    assert refused.value.code == RejectCode.IMAGE_MODE
    np.testing.assert_array_equal(np.asarray(stored(check(encode(Image.fromarray(values)), grey_bits=12))), values >> 4)
    with pytest.raises(RejectedError, match=r"data\.grey_bits 12"):
        check(encode(Image.fromarray(values * 16)), grey_bits=12)


def test_a_second_picture_behind_a_jpeg_does_not_matter() -> None:
    data = encode(picture(1), "MPO", save_all=True, append_images=[picture(2)])
    np.testing.assert_array_equal(np.asarray(stored(check(data))), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize(
    ("size", "limits", "code"),
    [
        ((3, 50), {}, RejectCode.IMAGE_TOO_SMALL),
        ((20, 20), {"min_image_side": 21}, RejectCode.IMAGE_TOO_SMALL),
        ((4, 1000), {}, RejectCode.IMAGE_ASPECT),
        ((50, 4), {"max_image_aspect": 12.0}, RejectCode.IMAGE_ASPECT),
        ((4, 800), {}, None),
        ((20, 20), {"min_image_side": 20, "max_image_aspect": 1.0}, None),
    ],
)
def test_shapes_within_the_limits_pass(size: tuple[int, int], limits: dict[str, Any], code: RejectCode | None) -> None:
    data = encode(Image.new("RGB", size))
    if code is None:
        assert check(data, **limits).data == data
        return
    with pytest.raises(RejectedError) as caught:
        check(data, **limits)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("code", "data"),
    [
        (RejectCode.IMAGE_EMPTY, b""),
        (RejectCode.IMAGE_UNIDENTIFIED, b"<html>not found</html>"),
        (RejectCode.IMAGE_UNIDENTIFIED, b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
        (RejectCode.IMAGE_UNIDENTIFIED, encode(picture(), "ICO")),  # a picture, but not of an allowed format
        (RejectCode.IMAGE_TRUNCATED, encode(picture(), "JPEG")[:-2]),
        (RejectCode.IMAGE_TRUNCATED, png(side=64)[:3000]),
        (RejectCode.IMAGE_DECODE_ERROR, corrupt(png())),
        (RejectCode.IMAGE_TOO_LARGE, png(side=101)),
        (RejectCode.IMAGE_MODE, encode(Image.new("F", (8, 8)), "TIFF")),
        (RejectCode.IMAGE_MODE, encode(Image.new("I", (8, 8)), "TIFF")),
    ],
)
def test_unusable_images_are_rejected_with_their_code(code: RejectCode, data: bytes) -> None:
    with pytest.raises(RejectedError) as caught:
        check(data)
    assert caught.value.code == code


def test_a_pixel_bomb_is_refused_from_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(RejectedError) as caught:
        check(png(side=101))
    assert caught.value.code == RejectCode.IMAGE_TOO_LARGE


@pytest.mark.parametrize("error", [TypeError, IndexError, ValueError])
def test_whatever_a_decoder_raises_rejects_the_image_alone(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(_image: Image.Image) -> None:
        raise error("broken")

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", load)
    with pytest.raises(RejectedError, match="does not decode: broken"):
        check_image(png(), DataConfig(source="builtin:digits", sequence_length=100))


def test_greys_with_multiplied_alpha_become_rgb() -> None:
    image, repair = _eight_bit_colour(Image.new("La", (8, 8)), 16)
    assert (image.mode, repair) == ("RGB", Repair.MODE_CONVERTED)
