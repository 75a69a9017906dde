"""Each texture channel equals an independent computation: scipy, colorsys, published colour values, plain loops."""

from __future__ import annotations

import colorsys
import math
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from tests.support.trainer.tiny_native import model_section
from vlmpipe.trainer.config.arr_coc.channels import CHANNELS
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.features.relevance.textures import image_of, lab_of, textures_of
from vlmpipe.trainer.models.registry import family_of

SIDE, ROWS, COLUMNS = 8, 3, 4
IMAGE = np.random.default_rng(0).random((ROWS * SIDE, COLUMNS * SIDE, 3))
FOUND = textures_of(torch.from_numpy(IMAGE).permute(2, 0, 1), SIDE).view(ROWS, COLUMNS, -1).numpy()
GREY = IMAGE @ [0.2126, 0.7152, 0.0722]


def channel(name: str) -> np.ndarray:
    return FOUND[..., CHANNELS.index(name)]


def in_cells(pixels: np.ndarray) -> np.ndarray:
    return pixels.reshape(ROWS, SIDE, COLUMNS, SIDE).swapaxes(1, 2).reshape(ROWS, COLUMNS, -1)


def means(pixels: np.ndarray) -> np.ndarray:
    return in_cells(pixels).mean(-1)


def assert_channel(name: str, expected: np.ndarray) -> None:
    assert np.ptp(expected) > 1e-3, "an even channel would prove nothing"
    np.testing.assert_allclose(channel(name), expected, atol=2e-5)


def test_there_are_22_channels_in_the_stored_order() -> None:
    assert len(CHANNELS) == len(set(CHANNELS)) == FOUND.shape[-1] == 22


@pytest.mark.parametrize("place", range(3))
def test_colours_are_means(place: int) -> None:
    assert_channel(("red", "green", "blue")[place], means(IMAGE[..., place]))


@pytest.mark.parametrize(
    ("colour", "expected"),  # CIE L*a*b* under D65, as published tables give it
    [
        ((1, 0, 0), (53.24, 80.09, 67.20)),
        ((0, 1, 0), (87.73, -86.18, 83.18)),
        ((0, 0, 1), (32.30, 79.19, -107.86)),
        ((1, 1, 1), (100, 0, 0)),
        ((0.5, 0.5, 0.5), (53.39, 0, 0)),
    ],
)
def test_lab_has_published_values(colour: tuple[float, ...], expected: tuple[float, ...]) -> None:
    found = lab_of(torch.tensor(colour, dtype=torch.float32).view(3, 1, 1)).flatten() * 100
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), atol=0.03, rtol=0)


def test_lab_channels_are_means_of_pixels() -> None:
    lab = lab_of(torch.from_numpy(IMAGE).permute(2, 0, 1).float()).numpy()
    for name, plane in zip(("lightness", "lab_a", "lab_b"), lab, strict=True):
        assert_channel(name, means(plane))
    centres = means(lab[0]) - lab[0].mean(), means(lab[1]) - lab[1].mean(), means(lab[2]) - lab[2].mean()
    assert_channel("distinctness", np.sqrt(sum(one**2 for one in centres)))


def test_edges_are_those_of_scipy() -> None:
    across, down = (ndimage.sobel(GREY, axis) / 4 for axis in (1, 0))
    strength = np.sqrt((across**2 + down**2) / 2)
    assert_channel("sobel_x", means(across))
    assert_channel("sobel_y", means(down))
    assert_channel("sobel_magnitude", means(strength))
    assert_channel("edge_density", means(strength > 0.1))
    assert_channel("laplacian", means(np.abs(ndimage.laplace(GREY))))


def test_duplicates_equal_their_originals() -> None:
    assert np.array_equal(channel("saliency"), channel("sobel_magnitude"))
    assert np.array_equal(channel("luminance"), channel("lightness"))


def test_hsv_is_that_of_colorsys() -> None:
    colours = np.stack([means(IMAGE[..., place]) for place in range(3)], -1)
    expected = np.array([[colorsys.rgb_to_hsv(*colour) for colour in row] for row in colours])
    for place, name in enumerate(("hue", "saturation", "value")):
        assert_channel(name, expected[..., place])


def test_entropy_and_contrast_are_those_of_each_cell() -> None:
    cells = in_cells(GREY)
    counts = [[Counter(min(15, int(value * 16)) for value in cell) for cell in row] for row in cells]
    expected = [
        [-sum(n / SIDE**2 * math.log(n / SIDE**2, 16) for n in count.values()) for count in row] for row in counts
    ]
    assert_channel("entropy", np.array(expected))
    assert_channel("contrast", cells.std(-1))


def test_positions_run_over_the_image_and_an_even_image_has_no_information() -> None:
    flat = textures_of(torch.full((3, ROWS * SIDE, COLUMNS * SIDE), 0.3), SIDE).view(ROWS, COLUMNS, -1).numpy()
    x, y = (flat[..., CHANNELS.index(f"position_{axis}")] for axis in "xy")
    np.testing.assert_allclose(x[0], [-0.75, -0.25, 0.25, 0.75])
    np.testing.assert_allclose(y[:, 0], [-2 / 3, 0, 2 / 3], atol=1e-6)
    np.testing.assert_allclose(flat[..., CHANNELS.index("eccentricity")], np.sqrt((x**2 + y**2) / 2), atol=1e-6)
    for name in ("entropy", "sobel_magnitude", "contrast", "laplacian", "edge_density", "distinctness"):
        np.testing.assert_allclose(flat[..., CHANNELS.index(name)], 0, atol=1e-5)


def test_the_image_is_put_together_from_patches() -> None:
    processor = family_of(config := ModelConfig.model_validate(model_section("qwen3_vl"))).image_processor(config)
    picture = np.random.default_rng(1).integers(0, 255, (24, 40, 3), dtype=np.uint8)  # kept at its size
    made = processor([Image.fromarray(picture)], return_tensors="pt")
    found = image_of(made["pixel_values"], tuple(made["image_grid_thw"][0].tolist()), processor)
    torch.testing.assert_close(found, torch.from_numpy(picture).permute(2, 0, 1) / 255, atol=1e-6, rtol=0)
