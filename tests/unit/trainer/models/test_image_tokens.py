"""Image tokens counted from what a tower's configuration says are those that its family counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paths import ROOT
from tests.support.short_form import WHOLE
from tests.support.trainer.tiny_native import CONFIGS, model_section
from vlmpipe.trainer.config.model import GRID_FAMILIES, ModelConfig
from vlmpipe.trainer.feature_cache.store import features_key
from vlmpipe.trainer.models.image_tokens import image_form_of, image_rule, image_tokens_of
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.image_grids import ImageGrids, VideoSize, near_square, patches_in_time

CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "num_attention_heads": 2, "patch_size": 7}
SIGLIP = CLIP | {"model_type": "siglip_vision_model"}
DUAL = {"model_type": "siglip", "vision_config": SIGLIP}


def model(tower: dict[str, Any], **changes: Any) -> ModelConfig:
    language_model = {"config": {"model_type": "qwen2"}}
    return ModelConfig.model_validate(
        {"tower": tower, "language_model": language_model, "tokenizer": "train:300", "image_size": 56} | changes
    )


def without(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


@pytest.mark.parametrize(
    "tower", [CLIP, SIGLIP, DUAL, without("patch_size", CLIP), {"model_type": "dinov2", "patch_size": 14}], ids=str
)
@pytest.mark.parametrize("select", ["full", "drop_cls"])
def test_the_count_is_the_familys(tower: dict[str, Any], select: str, tmp_path: Path) -> None:
    sized = {"image_size": 56}  # stored towers take images of their own size only
    vision = {"vision_config": tower["vision_config"] | sized} if "vision_config" in tower else sized
    (tmp_path / "config.json").write_text(json.dumps(tower | vision))
    for source in ({"config": tower}, {"weights": str(tmp_path)}):
        config = model(source, feature_select=select)
        assert image_tokens_of(config)(40, 30) == family_of(config).feature_shape(config)[0]


def test_torch_is_imported_only_for_an_incomplete_configuration() -> None:
    program = (
        "import sys; from vlmpipe.trainer.models.image_tokens import image_tokens_of;"
        "from tests.unit.trainer.models.test_image_tokens import *;"
        "before = 'torch' in sys.modules; image_tokens_of(model({'config': SIGLIP}))(4, 4);"
        "print(before, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "False"]


SIDES = st.integers(4, 3000)


@settings(max_examples=300 if WHOLE else 60)
@given(
    width=SIDES, height=SIDES, patch=st.sampled_from([4, 14, 16]), merge=st.sampled_from([1, 2]),
    least=st.integers(1, 200_000), more=st.integers(0, 3_000_000),
)  # fmt: skip
def test_token_counts_equal_the_image_processors_for_any_size(
    width: int, height: int, patch: int, merge: int, least: int, more: int
) -> None:
    from transformers import Qwen2VLImageProcessorPil

    grids = ImageGrids(patch, merge, least, least + more)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ValueError, match="longer than 200 times"):
            grids.tokens(width, height)
        return
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=merge, size={"shortest_edge": least, "longest_edge": least + more}
    )
    patches = processor.get_number_of_image_patches(height, width)
    rows, columns = grids.of(width, height)
    assert rows * columns == patches and grids.tokens(width, height) == patches // merge**2


@settings(max_examples=50)
@given(
    parts=st.lists(
        st.integers(0, 5)
        | st.tuples(st.integers(4, 90), st.integers(4, 90))
        | st.builds(VideoSize, st.integers(4, 90), st.integers(4, 90), st.integers(1, 4), st.floats(0.01, 99)),
        max_size=8,
    )
)
def test_positions_are_those_of_the_library(parts: list[int | tuple[int, int]]) -> None:
    """A sample of texts, of so many tokens, and images and videos, each between two tokens."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    form = image_form_of(ModelConfig.model_validate(model_section("qwen2_5_vl")))
    assert form.grids is not None and form.videos is not None
    kinds, sizes = [0], [part for part in parts if isinstance(part, tuple)]
    for part in parts:
        if isinstance(part, int):
            kinds += [0] * part
        else:
            kind = 2 if isinstance(part, VideoSize) else 1
            kinds += [0, *[kind] * form.grids.tokens(*part) * patches_in_time(part), 0]
    config = dict(CONFIGS["qwen2_5_vl"])
    config.pop("model_type")
    with torch.device("meta"):
        model = Qwen2_5_VLModel(Qwen2_5_VLConfig(**config))
    types = torch.tensor([kinds])
    videos = [size for size in sizes if isinstance(size, VideoSize)]
    stills = [size for size in sizes if not isinstance(size, VideoSize)]
    image_grids, video_grids = (
        torch.tensor([form.grids.grid(size) for size in kind]).reshape(-1, 3) for kind in (stills, videos)
    )
    expected, _ = model.get_rope_index(
        torch.zeros_like(types),
        mm_token_type_ids=types,
        image_grid_thw=image_grids,
        video_grid_thw=video_grids,
        second_per_grid_ts=torch.tensor([size.patch_s for size in videos]),
    )
    found = form.grids.positions(np.array(kinds) > 0, sizes, form.videos.tokens_per_s)
    assert found[0].tolist() == list(range(len(kinds)))
    assert found[1:].tolist() == expected[:, 0].tolist()


def test_the_image_token_rule_is_part_of_the_fingerprint() -> None:
    """Two bounds that the same few sizes do not tell apart give other data."""
    rules = [
        image_rule(ModelConfig.model_validate(model_section("qwen2_5_vl", max_pixels=most)))
        for most in (4_000_000, 4_000_001)
    ]
    assert rules[0] != rules[1]
    assert image_rule(model({"config": SIGLIP})) == [64] * 4, "that of llava stays as it was"


SIZES = [({"max_pixels": 4096}, True), ({"min_pixels": 300}, True), ({"seed": 9}, True), ({"freeze": ["tower"]}, False)]
SIDES_OF_SQUARES = [
    ({"image_size": 8}, True), ({"longest_edge": 64}, True), ({"image_size": 8, "longest_edge": 16}, True),
    ({"seed": 9}, True), ({"freeze": ["tower"]}, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "change", "is_another"),
    [(family, *each) for family in CONFIGS for each in (SIZES if family in GRID_FAMILIES else SIDES_OF_SQUARES)],
    ids=lambda value: str(value),
)
def test_cached_features_are_those_of_images_of_this_size(
    family: str, change: dict[str, Any], is_another: bool
) -> None:
    """An image of another size has other features, and other data prepared for it, under another name."""
    before = ModelConfig.model_validate(model_section(family))
    after = ModelConfig.model_validate(model_section(family, **change))
    assert (features_key(before, "fp32") != features_key(after, "fp32")) == is_another
    assert (image_rule(before) != image_rule(after)) == (is_another and "seed" not in change)


@given(tokens=st.integers(1, 20_000))
def test_near_square_loses_few_tokens(tokens: int) -> None:
    rows, columns = near_square(tokens)
    assert 0.8 * tokens <= rows * columns <= tokens
    assert rows <= columns <= 2 * rows or tokens == 3
