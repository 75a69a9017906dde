"""Run files whose export cannot be quantized, or not be asked, are refused before training."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.trainer.errors import ConfigError

INT4 = "evaluate.quantize={formats: [int4]}"


def config(*overrides: str, name: str = "digits") -> RunConfig:
    return load_run_file(ROOT / f"configs/{name}.yaml", [INT4, *overrides])


def test_a_bound_is_there_without_being_asked_for() -> None:
    quantize = config().evaluate.quantize
    assert quantize and (quantize.formats, quantize.min_agreement) == (("int4",), 0.98)
    assert load_run_file(ROOT / "configs/digits.yaml").evaluate.quantize is None


def test_an_adapter_is_refused_and_a_merged_export_is_not() -> None:
    merged, adapter = "model.lora.export=merged", "model.lora.export=adapter"
    assert config(merged, name="qwen2-5-vl-3b-lora").evaluate.quantize
    with pytest.raises(ConfigError, match=r"evaluate\.quantize.*\n?.*expected merged"):
        config(adapter, name="qwen2-5-vl-3b-lora")


def test_only_what_is_registered_is_quantized() -> None:
    runs = config(name="digits-stages").stage_runs()
    assert [bool(run.evaluate.quantize) for run in runs.values()] == [False, True], "an earlier stage is not registered"
    own = f"stages.align.{INT4}"
    asked = load_run_file(ROOT / "configs/digits-stages.yaml", [own]).stage_runs()
    assert [bool(run.evaluate.quantize) for run in asked.values()] == [True, False]
    with pytest.raises(ConfigError, match=r"evaluate\.quantize: found with tune, whose trainings register no model"):
        config(name="qwen2-5-vl-3b-tune")
    with pytest.raises(ConfigError, match=r"evaluate\.quantize: found with sweep, whose trainings register no model"):
        config("sweep.variants={a: {train.seed: 1}, b: {train.seed: 2}}")


def test_only_a_format_that_the_evaluation_makes_is_deployed() -> None:
    deploy = "deploy={endpoint: digits, quantized: %s}"
    deployed = config(deploy % "int4").deploy
    assert deployed and deployed.quantized == "int4"
    with pytest.raises(ConfigError, match=r"deploy\.quantized: found fp8, and evaluate\.quantize\.formats has int4"):
        config(deploy % "fp8")
    with pytest.raises(ConfigError, match=r"evaluate\.quantize\.formats has none"):
        load_run_file(ROOT / "configs/digits.yaml", [deploy % "int4"])


@pytest.mark.parametrize("formats", ["[]", "[int4, int4]", "[int3]"])
def test_formats_are_known_and_differ(formats: str) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.quantize\.formats"):
        load_run_file(ROOT / "configs/digits.yaml", [f"evaluate.quantize={{formats: {formats}}}"])


@pytest.mark.parametrize("section", ["evaluate.quantize={formats: [int4], ", "deploy={endpoint: digits, "])
def test_a_bound_that_accepts_any_answers_is_refused(section: str) -> None:
    with pytest.raises(ConfigError, match=r"min_agreement.*greater than 0"):
        load_run_file(ROOT / "configs/digits.yaml", [section + "min_agreement: 0}"])
