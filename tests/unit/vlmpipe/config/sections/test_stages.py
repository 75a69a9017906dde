"""Stages of a run file: what each one's own run file is, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file, parse_run_config, warnings
from vlmpipe.records.stage_folders import stage_run_id
from vlmpipe.trainer.config.job import export_dtype
from vlmpipe.trainer.errors import ConfigError

RUN_FILE = ROOT / "configs/digits-stages.yaml"


def load(*overrides: str) -> RunConfig:
    return load_run_file(RUN_FILE, overrides)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert caught.value.code == 64
    return str(caught.value)


def test_a_stage_is_the_run_file_with_its_own_values() -> None:
    config = load("stages.align.data.sequence_length=128", "stages.align.train.optimizer.betas=[0.9, 0.9]")
    align, finetune = config.stage_runs().values()
    assert (align.model.freeze, finetune.model.freeze) == (("tower", "language_model"), ("tower",))
    assert (align.data.sequence_length, finetune.data.sequence_length) == (128, config.data.sequence_length)
    optimizer = align.train.optimizer
    assert (optimizer.learning_rate, optimizer.betas) == (5e-3, (0.9, 0.9))
    assert optimizer.weight_decay == config.train.optimizer.weight_decay, "a section is merged, not replaced"
    assert finetune.model_copy(update={"stages": config.stages}) == config, "the last one is the run itself"


def test_only_the_last_stage_has_the_runs_gate_registry_and_name() -> None:
    config = load("register.model_name=digits", "stages.align.gate=none")
    align, finetune = config.stage_runs().values()
    assert (align.name, finetune.name) == ("digits-stages-align", "digits-stages")
    assert not align.gate.checks_something and finetune.gate == config.gate
    assert (align.model_name, finetune.model_name) == ("digits-stages-align", "digits"), "no stage has a champion"
    assert warnings(config) == []
    content = load().to_dict()
    content["stages"][0]["gate"] = {}
    assert parse_run_config(content, "empty").stage_runs()["align"].gate == align.gate
    assert load("stages.align.gate={min_exact_match: 0.1}").stage_runs()["align"].gate.min_exact_match == 0.1


def test_a_later_stage_trains_on_from_weights_that_were_not_rounded() -> None:
    config = load("train.precision=bf16")
    of = {name: export_dtype(run.model, run.train, run.checkpoint) for name, run in config.stage_runs().items()}
    assert of == {"align": "fp32", "finetune": "bf16"}
    asked = load("train.precision=bf16", "checkpoint.export_dtype=bf16").stage_runs()
    assert asked["align"].checkpoint.export_dtype == "bf16"


def test_the_last_stage_is_the_run_and_the_others_are_inside_its_folder() -> None:
    names = list(load().stage_runs())
    assert [stage_run_id("r1", name, names) for name in names] == ["r1/stages/align", "r1"]


def test_a_run_file_without_stages_is_its_own_only_stage() -> None:
    config = load_run_file(ROOT / "configs/digits.yaml")
    assert config.stage_runs() == {"": config}
    assert "stages" not in config.to_dict()


def test_the_stages_survive_json_and_decide_the_digest() -> None:
    config = load()
    again = parse_run_config(config.to_dict(), "again")
    assert again == config and again.digest() == config.digest()
    assert load("stages.align.train.max_steps=151").digest() != config.digest()


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("stages=[]", "stages: found []: expected at least one stage"),
        ("stages.finetune.name=align", "stages.1.name: found align twice"),
        ("stages.align.model={image_size: 32}", "stages.align.model.image_size: is the same in all stages"),
        ("stages.align.model={family: smolvlm}", "stages.align.model.family: is the same in all stages"),
        ("stages.align.model={tokenizer: gpt2}", "stages.align.model.tokenizer: is the same in all stages"),
        ("stages.align.model={tower: {config: {}}}", "stages.align.model.tower: is the same in all stages"),
        ("stages.finetune.model={pretrained: {weights: a/b}}", "stages.finetune.model.pretrained: is the same"),
        ("stages.align.model={freeze: []}", "stages.align.model.freeze: expected freeze of the stage itself"),
        ("stages.align.foo=1", "stages.0.foo: unknown key; known here: name, freeze, model, data"),
        ("stages.align.trian={}", "stages.0.trian: unknown key, did you mean stages.0.train?"),
        ("stages.align.train.epoch=3", "stages.align.train.epoch: unknown key, did you mean train.epochs?"),
        ("stages.align.freeze=[towe]", "stages.0.freeze: found \"towe\", expected one of tower"),
        ("stages.align.train=3", "stages.0.train: found 3, expected a section"),
        ("stages.align.name=Align", "stages.0.name: found \"Align\", expected a text of the form"),
        ("stages.align.gate.max_loss=null", "stages.align.gate: found no bound, with which no model is accepted"),
        ("stages.align.gate={max_regression: 0.1}", "stages.align.gate.max_regression: found 0.1, but only the last"),
        ("stages.align.plan={confirm_above_usd: 9}", "stages.align.plan.confirm_above_usd: is compared with the cost"),
        ("stages.finetune.freeze=[]", "stages.finetune.features.cache: found on, but the tower is trained"),
        ("stages.align.train.micro_batch_size=3", "stages.align.train: global_batch_size 4 must be a multiple"),
        ("train.micro_batch_size=3", "train: global_batch_size 4 must be a multiple"),
        ("name=" + "d" * 60, "stages.align: is " + "d" * 60 + "-align with the run file's name, expected at most 63"),
        (
            "stages=[{name: align, model: {lora: {export: adapter}}}, {name: finetune}]",
            "stages.align.model.lora.export: found adapter, but the next stage starts from a whole model",
        ),
        (
            "stages.finetune.model={lora: {pretrained: a/b}}",
            "stages.finetune.model.lora.pretrained: found \"a/b\", but this stage starts from the export",
        ),
        ("stages.alin.train.epochs=1", "stages.alin.train.epochs: there is no alin in the list; did you mean align?"),
        ("stages.align=3", "stages.align: stages is a list"),
        (
            "tune={parameters: {train.seed: {discrete_value_spec: {values: [1]}}}}",
            "tune: found with stages, expected null",
        ),
        ("train.max_steps=3", "train.max_steps: stage align has its own; expected stages.align.train.max_steps"),
        ("train.optimizer={learning_rate: 1}", "train.optimizer.learning_rate: stage align has its own"),
        ("model.freeze=[]", "model.freeze: stage align has its own; expected stages.align.freeze"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(override: str, found: str) -> None:
    lines = refusal(override).splitlines()
    assert len(lines) == 2 and lines[1].strip().startswith(found), "\n".join(lines)


def test_an_override_of_a_field_whose_other_form_a_stage_has_is_refused() -> None:
    stage = "stages.align.train.warmup_fraction"
    with pytest.raises(ConfigError, match=f"train.warmup_fraction: stage align has its own; expected {stage}"):
        load(f"{stage}=0.1", "train.warmup_steps=2")
    runs = load(f"{stage}=0.1", "stages.finetune.train.warmup_steps=2").stage_runs()
    assert [run.train.warmup_steps for run in runs.values()] == [None, 2]


def test_a_problem_of_all_stages_is_said_once() -> None:
    assert refusal("data.validation_fraction=0").count("data.validation_fraction") == 1


@pytest.mark.parametrize("content", [3, None, "align", [3], [{"name": 3}], [{}], [["align"]]])
def test_stages_of_another_kind_are_refused(content: Any) -> None:
    with pytest.raises(ConfigError, match="stages"):
        parse_run_config(load().to_dict() | {"stages": content}, "mutated")
