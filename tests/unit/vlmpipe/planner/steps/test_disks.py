"""Disks that a pipeline is compiled with, and the bound that saves building the model for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paths import ROOT
from tests.support.short_form import WHOLE
from vlmpipe.catalog.machines import KnownModel, load_models
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.planner.steps.disks import compiled_disks, largest_shape
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.model_shape import ModelShape

DIGITS = ROOT / "configs/digits.yaml"
SEVENTY_B = ROOT / "configs/llava-70b.yaml"
ON_THE_HUB = "register.hub={repo_id: my-team/llava}"
SHIPPED = sorted(ROOT.glob("configs/**/*.yaml"))


def refused(_config: RunConfig) -> ModelShape:
    raise AssertionError("built")


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmpipe.planner.steps.disks.architecture", refused)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.usefixtures("unbuilt")
def test_a_shipped_run_file_is_compiled_without_building_its_model(path: Path) -> None:
    assert all(compiled_disks(run) == {} for run in load_run_file(path).stage_runs().values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.language_model", {"weights": "my-team/unknown"}),
        ("model.tower.config.hidden_size", None),
        ("model.language_model.config.num_hidden_layers", None),
        ("model.language_model.config.num_experts", 8),
        ("model.language_model.config.hidden_size", 65536),
    ],
)
@pytest.mark.usefixtures("unbuilt")
def test_a_model_of_sizes_that_are_not_given_or_large_is_built(field: str, value: Any) -> None:
    content = load_run_file(DIGITS).given()
    place = content
    *path, last = field.split(".")
    for name in path:
        place = place[name]
    place.pop(last) if value is None else place.update({last: value})
    with pytest.raises(AssertionError, match="built"):
        compiled_disks(RunConfig.model_validate(content))


@pytest.mark.parametrize("absent", ["text_config", "vision_config"])
def test_a_model_without_one_of_its_configurations_has_no_bound(absent: str) -> None:
    """The sizes of its texts may stand beside those of its tower, as Qwen2.5-VL publishes them, or be defaults."""
    content = load_run_file(ROOT / "configs/arr-coc.yaml").given()
    assert largest_shape(RunConfig.model_validate(content))
    content["model"]["pretrained"]["config"].pop(absent)
    assert largest_shape(RunConfig.model_validate(content)) is None


def test_a_model_that_does_not_fit_by_its_bound_gets_the_disk_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hub = load_run_file(SEVENTY_B, [ON_THE_HUB])
    assert compiled_disks(on_hub)["register-model"] >= 200, "141 GB of bf16 weights"
    monkeypatch.setattr("vlmpipe.planner.steps.disks.architecture", refused)
    with pytest.raises(AssertionError, match="built"):
        compiled_disks(on_hub)


@pytest.mark.parametrize("path", [ROOT / "configs/arr-coc.yaml", ROOT / "configs/qwen2-5-vl-7b-qlora.yaml"])
def test_the_bound_is_above_the_model(path: Path) -> None:
    for run in load_run_file(path).stage_runs().values():
        assert_above(largest_shape(run), architecture(run).shape)


sizes = st.fixed_dictionaries(
    {
        "hidden": st.sampled_from([16, 64, 256]),
        "intermediate": st.sampled_from([8, 64, 1024]),
        "layers": st.integers(1, 3),
        "head_dim": st.sampled_from([8, 64]),
        "vocabulary": st.sampled_from([512, 5000]),
        "patch": st.sampled_from([8, 32]),
        "adapted": st.booleans(),
    }
)


@settings(max_examples=100 if WHOLE else 5)
@given(sizes=sizes)
def test_the_bound_is_above_every_small_model(sizes: dict[str, Any]) -> None:
    content = load_run_file(DIGITS).given()
    model = content["model"]
    stack = {"hidden_size": sizes["hidden"], "intermediate_size": sizes["intermediate"]}
    stack["num_hidden_layers"] = sizes["layers"]
    model["tower"]["config"] |= stack | {"patch_size": sizes["patch"]}
    model["language_model"]["config"] |= {**stack, "head_dim": sizes["head_dim"], "tie_word_embeddings": False}
    model["tokenizer"] = f"train:{sizes['vocabulary']}"
    if sizes["adapted"]:
        model["lora"] = {"rank": 8}
    run = RunConfig.model_validate(content)
    assert_above(largest_shape(run), family_of(run.model).shape(run.model))


def assert_above(bound: ModelShape | None, exact: ModelShape) -> None:
    assert bound
    matrix = exact.language.hidden * exact.language.intermediate
    assert bound.parameters["embedding"] >= max(exact.parameters["embedding"], exact.parameters["head"], matrix)
    assert bound.total_parameters >= exact.total_parameters
    assert bound.trainable_parameters >= exact.trainable_parameters


@pytest.mark.parametrize("known", load_models().values(), ids=load_models())
def test_the_largest_matrix_of_a_known_model_is_that_of_its_configuration(known: KnownModel) -> None:
    """Its number of parameters is compared with the built model's in test_machines.py."""
    text = known.config.get("text_config", known.config)
    assert {"hidden_size", "intermediate_size"} <= set(text), json.dumps(known.config)
    assert not any("expert" in name for name in text), "a matrix for each expert"
