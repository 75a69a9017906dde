"""Answers of the planner that are kept: never other than those that were found, and never in the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.analysed_models import forget_analyses
from tests.support.paths import ROOT
from tests.support.trainer.memory_cases import Case
from tests.support.trainer.tiny_native import CONFIGS
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner import disk_cache as kept
from vlmpipe.planner import model_architecture as architecture
from vlmpipe.planner.memory import activations
from vlmpipe.planner.memory import pipeline_stage as stage_memory
from vlmpipe.planner.memory import zero_persistence as persistent
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.plan import plan_run
from vlmpipe.planner.search.memory import planned_stages
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models import registry as table
from vlmpipe.trainer.sizing.model_shape import ModelShape
from vlmpipe.trainer.tracing import step as tracing

KEPT: tuple[Any, ...] = (
    activations._traced,
    stage_memory._traced,
    persistent._small,
    architecture._shape,
    architecture._shardable,
)
ON_GPUS = [
    "cluster.machine_type=a2-ultragpu-8g", "cluster.accelerator_type=NVIDIA_A100_80GB", "cluster.accelerator_count=8",
    "cluster.processes_per_replica=auto", "gcp.location=us-central1", "train.global_batch_size=32",
]  # fmt: skip
PIPELINE = Case("pp", cached=False, changes={"features.cache": "off"})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache" / kept.FOLDER
    forget()


def forget() -> None:
    """What this process remembers."""
    for function in KEPT:
        function.cache_clear()


def answers(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.json"))


def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be found anew."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked again")

    for place, name in ((table, "family_of"), (tracing, "trace_step")):
        monkeypatch.setattr(place, name, refuse)


def shape_of(config: RunConfig) -> ModelShape:
    return architecture.architecture(config).shape


def held_by_a_step(config: RunConfig) -> object:
    return activations.activations(config, shape_of(config))


def held_by_a_stage(config: RunConfig) -> object:
    layout, shape = layout_of(config), shape_of(config)
    stages = planned_stages(config, shape, layout, Workload.assumed(config, shape), cached=False)
    return stage_memory.stage_phases(config, shape, stages, 0, passes=2)


@pytest.mark.parametrize(
    ("case", "asked"),
    [
        (Case("ddp"), held_by_a_step),
        pytest.param(Case("fsdp", family="qwen2_5_vl"), held_by_a_step, marks=pytest.mark.slow),
        pytest.param(Case("fsdp", family="qwen3_vl"), held_by_a_step, marks=pytest.mark.slow),
        (Case("zero2", family="qwen3_vl"), held_by_a_step),
        (PIPELINE, held_by_a_stage),
        (Case("ddp", {"model.lora.rank": 4}), shape_of),
    ],
    ids=lambda one: f"{one.strategy} {one.family}" if isinstance(one, Case) else one.__name__,
)
def test_a_cached_result_equals_the_computed_one(
    case: Case, asked: Callable[[RunConfig], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = case.config(2)
    found = asked(config)
    forget()
    no_torch(monkeypatch)
    assert asked(config) == found


def test_a_refusal_is_cached_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Case("tp").config(2).model
    texts = []
    for _ in range(2):
        with pytest.raises(ConfigError, match="does not divide") as caught:
            architecture.require_shardable(model, 3, cached=False, sequence=False)
        texts.append(caught.value.text())
        forget()
        no_torch(monkeypatch)
    assert texts[0] == texts[1]


def test_another_model_or_argument_is_computed_anew(folder: Path) -> None:
    shapes = {
        layers: shape_of(Case("ddp", {"model.language_model.config.num_hidden_layers": layers}).config(2))
        for layers in (2, 3)
    }
    assert [shape.language.layers for shape in shapes.values()] == [2, 3]
    config = Case("ddp").config(2)
    found = [activations.activations(config, shape_of(config), [(images, 64)]).input_bytes for images in (1, 2)]
    assert found[0] < found[1]


def test_another_configuration_in_the_same_folder_is_another_model(tmp_path: Path) -> None:
    def layers(count: int) -> int:
        tower = CONFIGS["qwen2_5_vl"] | {
            "text_config": CONFIGS["qwen2_5_vl"]["text_config"] | {"num_hidden_layers": count}
        }
        (tmp_path / "config.json").write_text(json.dumps(tower))
        model = Case("ddp", family="qwen2_5_vl").config(2).model.model_dump(mode="json")
        model["pretrained"] = {"weights": str(tmp_path)}
        for part in ("tower", "language_model"):
            model.pop(part, None)
        section = ModelConfig.model_validate(model)
        forget()
        return architecture._shape(section.model_dump_json()).language.layers

    assert [layers(2), layers(3)] == [2, 3]


def test_a_damaged_cache_file_is_written_again(folder: Path) -> None:
    config = Case("ddp").config(2)
    found = shape_of(config)
    (kept_file,) = answers(folder)
    whole = kept_file.read_text()
    for damage in ("", "{", whole.replace('"layers":', '"levels":', 1)):
        kept_file.write_text(damage)
        forget()
        assert shape_of(config) == found
        assert kept_file.read_text() == whole


def test_planning_works_without_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Case("ddp").config(2)
    found = shape_of(config)
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "a file"))
    forget()
    assert shape_of(config) == found


def test_results_are_in_the_users_cache_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLMPIPE_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    shape_of(Case("ddp").config(2))
    assert len(answers(tmp_path / "home/.cache/vlmpipe" / kept.FOLDER)) == 1


def test_planning_works_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLMPIPE_CACHE_DIR")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert shape_of(Case("ddp").config(2)).language.layers == 4


def test_a_model_folder_without_configuration_is_not_cached(folder: Path, tmp_path: Path) -> None:
    """A GGUF file has its configuration inside: another one in its place would be taken for the first."""

    @kept.disk_cached
    def asked(model: str) -> int:
        times.append(model)
        return len(times)

    times: list[str] = []
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    model = Case("ddp").config(2).model.model_copy(update={"language_model": WeightsConfig(weights=str(tmp_path))})
    assert asked(model.model_dump_json()) == 1
    asked.cache_clear()  # type: ignore[attr-defined]
    assert asked(model.model_dump_json()) == 2
    assert answers(folder) == []


def test_a_full_disk_only_loses_the_cached_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert shape_of(Case("ddp").config(2)).language.layers == 4
    assert answers(folder) == []


def test_other_code_has_its_own_results_and_old_ones_are_deleted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Case("ddp").config(2)
    shape_of(config)
    (first,) = answers(folder)
    os.utime(first.parent, (0, 0))
    copy = tmp_path / "trainer"
    shutil.copytree(ROOT / "trainer", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "flops.py").write_text("changed = True\n")
    monkeypatch.setattr(kept.vlmpipe.trainer, "__path__", [str(copy)])
    kept._code.cache_clear()
    forget()
    shape_of(config)
    kept._code.cache_clear()
    (second,) = answers(folder)
    assert second.parent.name != first.parent.name


def test_the_second_plan_needs_neither_torch_nor_transformers(folder: Path) -> None:
    """The first is of this process, which has both."""
    run_file, overrides = ROOT / "configs/digits.yaml", ["plan.samples=1000", "plan.sample_tokens=100", *ON_GPUS]
    program = (
        "import json, sys\n"
        "from vlmpipe.config.run_config import load_run_file\n"
        "from vlmpipe.planner.plan import plan_run\n"
        f"plan = plan_run(load_run_file({str(run_file)!r}, {overrides!r}))\n"
        "heavy = [name for name in ('torch', 'transformers') if name in sys.modules]\n"
        "print(json.dumps([heavy, plan.memory.total_bytes, plan.cost.usd]))"
    )
    forget_analyses()
    first = plan_run(load_run_file(run_file, overrides))
    assert first.memory and first.cost and first.cost.usd and answers(folder)
    second = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    assert json.loads(second.stdout) == [[], first.memory.total_bytes, first.cost.usd]
