"""What check and plan know of a model of any type: its parameters, its images, and whether it can be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.hf.publish import model_section, publish
from tests.support.pipelines.run_files import small
from vlmpipe.planner.image_token_limit import image_token_limit
from vlmpipe.planner.memory.activations import activations
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.planner.time.feature_cache import feature_bytes
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention import mixers, varlen
from vlmpipe.trainer.models.hf import trainability
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape, inputs_of, tensors_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))


def config_of(folder: Path, **changes: Any) -> Any:
    return small(model=model_section(folder), features__cache="auto", **changes)


@pytest.mark.parametrize("model_type", ["gemma3", pytest.param("glm46v", marks=pytest.mark.slow)])
def test_a_plan_counts_the_models_own_parameters(model_type: str, tmp_path: Path) -> None:
    config = config_of(publish(model_type, tmp_path / "model"), train__activation_checkpointing="none")
    family, found = family_of(config.model), architecture(config)
    model = family.build(config.model, family.images(config.model).processor.tokenizer)
    assert found.shape.total_parameters == sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert found.shape.trainable_parameters == trained
    assert "per image by its size" in image_token_limit(config.model, config.data)
    held = activations(config, found.shape)
    logits = 4 * config.train.loss_chunk_tokens * found.shape.vocabulary
    hidden = 4 * config.data.sequence_length * found.shape.language.hidden
    assert sum(held.forward.values()) > hidden * found.shape.language.layers + min(logits, hidden)


@pytest.mark.parametrize("model_type", [pytest.param("gemma3", marks=pytest.mark.slow), "glm46v"])
def test_a_plan_with_cached_features_knows_their_size_and_holds_no_pixels(model_type: str, tmp_path: Path) -> None:
    section = model_section(publish(model_type, tmp_path / "model"), freeze=("tower", "projector"))
    config = small(model=section, features__cache="on")
    family, found = family_of(config.model), architecture(config)
    images = family.images(config.model)
    picture = images.tensors([Image.new("RGB", images.largest)])
    (features,) = family.encode(config.model, family.build_tower(config.model), picture)
    assert feature_bytes(found.shape) == features.nbytes
    assert activations(config, found.shape).forward
    one_image = SequenceShape(1, config.data.sequence_length, 1, 8)
    given = [inputs_of(config.model, one_image, found.shape.vocabulary, cached=cached) for cached in (True, False)]
    stored, pixels = (sum(tensor.nbytes for tensor in tensors_of(each)) for each in given)
    assert pixels - stored == picture["pixel_values"].nbytes - features.nbytes


def test_a_type_whose_mixers_are_not_known_is_refused_in_check_and_planned_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixers, "MIXERS", {})
    monkeypatch.setattr(varlen, "MIXERS", {})
    trainability._examine.cache_clear()
    folder = publish("qwen3_5", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"lets samples in one sequence see each other") as raised:
        architecture(config_of(folder))
    assert raised.value.fix == "set data.pack to false"
    assert architecture(config_of(folder, data__pack=False)).shape.total_parameters > 0
    trainability._examine.cache_clear()


def test_a_hybrid_model_is_planned_packed(tmp_path: Path) -> None:
    found = architecture(config_of(publish("qwen3_5", tmp_path / "model")))
    assert found.shape.total_parameters > 0


def test_a_prefix_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="answers would be visible"):
        architecture(config_of(publish("paligemma", tmp_path / "model"), data__pack=False))
