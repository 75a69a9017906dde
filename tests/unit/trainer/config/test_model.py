"""The model section: what each family has, and what does not apply to it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.pipelines.run_files import SMALL, problems_of, small
from vlmpipe.config.run_config import parse_run_config

WHOLE_MODEL = {"family": "qwen2_5_vl", "pretrained": {"config": {"model_type": "qwen2_5_vl"}}, "tokenizer": "train:300"}


def test_a_whole_model_is_where_tower_and_language_model_are_from_and_is_written_as_it_was_given() -> None:
    config = small(model=WHOLE_MODEL | {"max_pixels": 50_000})
    assert config.model.tower == config.model.language_model == config.model.pretrained
    dumped = config.to_dict()
    assert "tower" not in dumped["model"] and parse_run_config(dumped, "again") == config


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({}, "family qwen2_5_vl needs max_pixels"),
        ({"pretrained": None, "max_pixels": 50_000}, "family qwen2_5_vl needs pretrained"),
        ({"tower": {"weights": "x"}, "max_pixels": 50_000}, "has no tower of its own: pretrained is where"),
        ({"image_size": 32, "max_pixels": 50_000}, "image_size does not apply to family qwen2_5_vl"),
        ({"longest_edge": 64, "max_pixels": 50_000}, "longest_edge does not apply to family qwen2_5_vl"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels 9 is more than max_pixels 8"),
    ],
)
def test_what_has_no_meaning_for_a_whole_model_is_refused(model: dict[str, Any], sentence: str) -> None:
    assert sentence in problems_of(model=WHOLE_MODEL | model)["model"]


QWEN = WHOLE_MODEL | {"max_pixels": 50_000, "tokenizer": "org/qwen"}
SMOLVLM = {"family": "smolvlm", "pretrained": {"config": {"model_type": "smolvlm"}}, "tokenizer": "train:300"}


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({}, "family smolvlm needs image_size"),
        ({"image_size": 32, "max_pixels": 9}, "max_pixels does not apply to family smolvlm, which has pretrained"),
        ({"image_size": 32, "feature_layer": -2}, "feature_layer does not apply to family smolvlm"),
        ({"image_size": 32, "do_image_splitting": True}, "one tile, the square of image_size, unless longest_edge"),
        ({"image_size": 32, "longest_edge": 80}, "a multiple of that, twice it at least and 4096 at most"),
        ({"image_size": 32, "longest_edge": 32}, "longest_edge 32 is not cut into tiles of image_size 32"),
        ({"image_size": 32, "longest_edge": 4128}, "longest_edge 4128 is not cut into tiles"),
    ],
)
def test_what_has_no_meaning_for_smolvlm_is_refused(model: dict[str, Any], sentence: str) -> None:
    assert sentence in problems_of(model=SMOLVLM | model)["model"]


HF = {"family": "hf", "pretrained": {"weights": "org/model"}, "tokenizer": "org/model"}


@pytest.mark.parametrize(
    ("changes", "field", "sentence"),
    [
        ({"model": HF | {"image_size": 32}}, "model", "image_size does not apply to family hf"),
        ({"model": HF | {"min_pixels": 9}}, "model", "min_pixels does not apply to family hf"),
        ({"model": HF | {"min_pixels": 9, "max_pixels": 8}}, "model", "min_pixels 9 is more than max_pixels 8"),
        ({"model": HF | {"max_pixels": 9, "image_processor": {}}}, "model", "image_processor does not apply with max"),
        ({"model": HF | {"tokenizer": "train:300"}}, "model", "family hf takes a published tokenizer"),
        ({"data__video": "native"}, "data.video", "expected qwen2_5_vl or qwen3_vl, or hf with max_pixels, or frames"),
        ({"model": HF | {"pretrained": {"config": {"model_type": "gemma3"}}}}, "model", "takes weights only"),
    ],
)
def test_what_family_hf_cannot_do_is_refused(changes: dict[str, Any], field: str, sentence: str) -> None:
    assert sentence in problems_of(**{"model": HF, "features__cache": "auto"} | changes)[field]


def test_settings_of_an_image_processor_are_for_family_hf() -> None:
    assert "image_processor does not apply to family llava" in problems_of(model__image_processor={})["model"]


def test_what_has_no_meaning_for_llava_is_refused() -> None:
    assert "max_pixels does not apply to family llava" in problems_of(model__max_pixels=50_000)["model"]
    assert "longest_edge does not apply to family llava" in problems_of(model__longest_edge=64)["model"]
    without_size = {name: value for name, value in SMALL["model"].items() if name != "image_size"}
    assert "family llava needs image_size" in problems_of(model=without_size)["model"]


def test_images_that_a_whole_model_cannot_take_are_refused() -> None:
    found = problems_of(model=WHOLE_MODEL | {"max_pixels": 50_000}, data__max_image_aspect=300)
    assert "expected at most 200" in found["data.max_image_aspect"]


@pytest.mark.parametrize(
    ("changes", "field", "sentence"),
    [
        ({}, "data.video", "expected qwen2_5_vl or qwen3_vl, or hf with max"),
        ({"model": QWEN | {"tokenizer": "train:300"}}, "data.video", "which has no token of videos"),
        ({"model": QWEN, "data__video_frames": 1}, "data.video_frames", "expected 2 to 16000"),
        ({"model": QWEN, "data__video_times": True}, "data.video_times", "gives times as the model's own processor"),
    ],
)
def test_what_does_not_go_with_videos_as_such_is_refused(changes: dict[str, Any], field: str, sentence: str) -> None:
    assert sentence in problems_of(**{"data__video": "native"} | changes)[field]


WHOLE = {"weights": "org/llava"}


def test_a_whole_llava_is_where_its_parts_are_from_and_is_written_as_it_was_given() -> None:
    given = {"pretrained": WHOLE, "tokenizer": "train:300", "image_size": 32}
    config = small(model=given)
    assert config.model.tower == config.model.projector == config.model.language_model == config.model.pretrained
    assert config.to_dict()["model"].keys() & {"tower", "projector", "language_model"} == set()
    assert parse_run_config(config.to_dict(), "again") == config
    assert config.model.origins() == {"pretrained": "org/llava"}
    mixed = small(model={**SMALL["model"], "projector": {"weights": "gs://b/llava", "revision": "12"}})
    assert list(mixed.model.origins().values())[1] == "gs://b/llava at 12"
    assert small().model.origins()["projector"] == "drawn from seed 0"


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"pretrained": WHOLE}, "pretrained is where all parts come from, so tower and language_model cannot be given"),
        ({"projector": {"config": {"model_type": "llava"}}}, "projector of family llava takes weights only"),
        ({"projector": {"weights": ""}}, "exactly one of weights"),
        ({"projector": "org/llava"}, "org/llava"),
        ({"hub_token_secret": "hf_abcdefgh"}, "projects"),
    ],
)
def test_parts_of_llava_that_contradict_each_other_are_refused(model: dict[str, Any], sentence: str) -> None:
    assert sentence in "; ".join(problems_of(model={**SMALL["model"], **model}).values())
    new = {"pretrained": {"config": {"model_type": "llava"}}, "tokenizer": "train:300", "image_size": 32}
    assert "pretrained of family llava takes weights only" in problems_of(model=new)["model"]
