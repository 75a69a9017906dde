"""Patches: to the bit what the Qwen-VL families' own image processor makes of images."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2VLImageProcessorPil, SiglipImageProcessorPil

from tests.support.data.prepared import encode, picture
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models import image_threads
from vlmpipe.trainer.models.image_patches import PatchPreparer
from vlmpipe.trainer.models.video_file import joined
from vlmpipe.trainer.sizing.image_grids import ImageGrids

MEAN, DEVIATION = [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]  # Qwen3-VL's


def processor_of(grids: ImageGrids, **changes: Any) -> Qwen2VLImageProcessorPil:
    bounds = {"shortest_edge": grids.min_pixels, "longest_edge": grids.max_pixels}
    return Qwen2VLImageProcessorPil(
        size=bounds, patch_size=grids.patch, merge_size=grids.merge, temporal_patch_size=2, **changes
    )


GRIDS = {
    "qwen2_5_vl": (ImageGrids(14, 2, 56 * 56, 40 * 28 * 28), {}),
    "qwen3_vl": (ImageGrids(16, 2, 64 * 64, 30 * 32 * 32), {"image_mean": MEAN, "image_std": DEVIATION}),
    "unscaled": (ImageGrids(4, 3, 12 * 12, 50 * 12 * 12), {"do_rescale": False}),
    "not normalized": (ImageGrids(6, 1, 6 * 6, 90 * 6 * 6), {"do_normalize": False}),
}
PICTURES = {
    "larger": encode(picture(1, side=260), "JPEG"),
    "smaller": encode(picture(2, side=11)),
    "wide": encode(picture(3, side=64).resize((190, 21)), "JPEG"),
    "tall": encode(picture(3, side=64).resize((30, 222)), "JPEG"),
    "grey": encode(picture(4, mode="L")),
    "palette": encode(picture(5).convert("P")),
    "of a size that stays": encode(picture(6, side=28 * 4)),
}


def by_library(processor: Any, data: bytes) -> tuple[torch.Tensor, tuple[int, ...]]:
    made = processor([Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="pt")
    return made["pixel_values"], tuple(made["image_grid_thw"][0].tolist())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", GRIDS)
def test_patches_are_those_of_the_image_processor(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_threads, "num_threads", lambda: threads)
    image_threads._pool.cache_clear()
    grids, changes = GRIDS[name]
    processor = processor_of(grids, **changes)
    found = PatchPreparer(processor, grids)(list(PICTURES.values()))
    patches, expected_grids = zip(*(by_library(processor, data) for data in PICTURES.values()), strict=True)
    assert isinstance(found.values, torch.Tensor)
    assert found.grids == expected_grids
    assert found.values.dtype == patches[0].dtype and torch.equal(found.values, torch.cat(patches))


@settings(max_examples=25, deadline=None)
@given(width=st.integers(1, 120), height=st.integers(1, 120), seed=st.integers(0, 99))
def test_so_are_those_of_any_size(width: int, height: int, seed: int) -> None:
    grids, changes = GRIDS["qwen2_5_vl"]
    processor = processor_of(grids, **changes)
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    data = encode(Image.fromarray(values))
    expected, grid = by_library(processor, data)
    found = PatchPreparer(processor, grids)([data])
    assert isinstance(found.values, torch.Tensor)
    assert found.grids == (grid,) and torch.equal(found.values, expected)


def test_frames_of_a_video_fill_their_places_in_time() -> None:
    """The n-th frame of a patch is the n-th of its places; the library fills all of them with a still image."""
    grids, _ = GRIDS["qwen2_5_vl"]
    processor = processor_of(grids)
    frames = [encode(picture(number, side=70), "JPEG") for number in range(4)]
    found = PatchPreparer(processor, grids)([frames[0], joined(frames), frames[3]])
    assert isinstance(found.values, torch.Tensor) and found.grids is not None
    stills = [by_library(processor, data)[0].view(-1, 3, 2, 14 * 14) for data in frames]
    expected = [
        stills[0],
        torch.stack([stills[0][:, :, 0], stills[1][:, :, 1]], dim=2),
        torch.stack([stills[2][:, :, 0], stills[3][:, :, 1]], dim=2),
        stills[3],
    ]
    assert [grid[0] for grid in found.grids] == [1, 2, 1]
    assert torch.equal(found.values, torch.cat(expected).view(len(found.values), -1))


def test_a_still_with_the_mark_of_a_video_is_a_still() -> None:
    """Whoever wrote the file decides nothing: a made-up list of frames once ended whole runs."""
    grids, _ = GRIDS["qwen2_5_vl"]
    frames = [encode(picture(number, side=70), "JPEG") for number in range(4)]
    found = PatchPreparer(processor_of(grids), grids)([bytes(joined(frames)), frames[0]])
    assert isinstance(found.values, torch.Tensor) and found.grids is not None
    assert [grid[0] for grid in found.grids] == [1, 1]
    still, expected = found.values.chunk(2)
    assert torch.equal(still, expected)


def test_without_images_there_are_no_patches() -> None:
    grids, _ = GRIDS["qwen2_5_vl"]
    made = PatchPreparer(processor_of(grids), grids)([])
    assert isinstance(made.values, torch.Tensor)
    assert made.values.shape == (0, 3 * 2 * 14**2) and made.grids == ()


@pytest.mark.parametrize(
    "processor", [SiglipImageProcessorPil(), processor_of(GRIDS["qwen2_5_vl"][0], do_resize=False)]
)
def test_another_processor_is_refused(processor: Any) -> None:
    with pytest.raises(ConfigError, match="whose patches are not known here"):
        PatchPreparer(processor, GRIDS["qwen2_5_vl"][0])
