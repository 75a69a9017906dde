"""Sweeps of a run file: which variants there are, and what is refused."""

from __future__ import annotations

import json

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file, warnings
from vlmpipe.config.sections.sweep import baseline_of, variants_of
from vlmpipe.trainer.errors import ConfigError

DIGITS, STAGES = ROOT / "configs/digits.yaml", ROOT / "configs/arr-coc.yaml"
ONE_NODE = "cluster.replica_count=1"
CHANNELS = "stages.relevance.model.relevance.channels"
RELEVANCE = "stages.relevance.model.relevance"
EPOCHS = "stages.relevance.train.epochs"


def load(sweep: object, *overrides: str, stages: bool = False) -> RunConfig:
    nodes = [] if any("replica_count" in one for one in overrides) else [ONE_NODE]
    return load_run_file(STAGES if stages else DIGITS, [*nodes, f"sweep={json.dumps(sweep)}", *overrides])


def refusal(sweep: object, *overrides: str, stages: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        load(sweep, *overrides, stages=stages)
    assert caught.value.code == 64
    return str(caught.value)


def names(config: RunConfig) -> list[str]:
    assert config.sweep
    return [variant.name for variant in variants_of(config.sweep)]


def test_a_grid_has_every_combination_and_named_variants_are_combined_with_it() -> None:
    grid = {"train.optimizer.learning_rate": [1e-3, 1e-2], "train.global_batch_size": [8, 16]}
    config = load({"grid": grid})
    assert names(config) == [
        f"learning_rate-{rate}--global_batch_size-{size}" for rate in ("0.001", "0.01") for size in (8, 16)
    ]
    assert config.sweep
    assert baseline_of(config.sweep) == names(config)[0]
    last = config.variant(variants_of(config.sweep)[-1])
    assert (last.train.optimizer.learning_rate, last.train.global_batch_size, last.sweep) == (1e-2, 16, None)
    both = load({"grid": {"train.global_batch_size": [8, 16]}, "variants": {"a": {}, "b": {"train.seed": 7}}})
    assert names(both) == [f"{name}--global_batch_size-{size}" for name in ("a", "b") for size in (8, 16)]


def test_values_that_are_no_scalars_are_named_by_their_place() -> None:
    config = load({"grid": {"train.optimizer.betas": [[0.9, 0.9], [0.9, 0.99]]}})
    assert names(config) == ["betas-1", "betas-2"]


@pytest.mark.parametrize(
    ("sweep", "overrides", "said"),
    [
        ({"variants": {"a": {}}}, [], "found 1 variant, expected at least two"),
        ({"variants": {"A": {}, "b": {}}}, [], "sweep.variants.A"),
        ({"variants": {"a": {}, "b": {"train.sead": 1}}}, [], "sweep.variants.b: train.sead"),
        ({"variants": {"a": {}, "b": {"train.max_steps": 500}}}, ["train.max_steps=500"], "b: trains the same as a"),
        ({"variants": {"a": {}, "b": {"gate.min_exact_match": 0.1}}}, [], "found gate.min_exact_match, which changes"),
        (
            {"grid": {"train.global_batch_size": [8, 16]}, "variants": {"a": {"train.seed": 0}}},
            [],
            "found train.seed, which changes nothing of any variant",
        ),
        ({"grid": {"train.max_steps": [5, 5]}}, [], "found 2 variants of this name"),
        ({"grid": {"train.max_steps": [5, 6]}, "baseline": "max_steps-7"}, [], "did you mean max_steps-"),
        (
            {
                "grid": {"train.max_steps": [5, 6]},
                "hypotheses": [{"claim": "x", "variant": "max_steps-5", "against": ["max_steps-5"]}],
            },
            [],
            "found max_steps-5 against itself",
        ),
        ({"grid": {"train.max_steps": [5, 6]}, "starts": 600}, [], "found 1,200 trainings, expected at most 1,000"),
        ({"grid": {"train.max_steps": [5, 6]}, "trainings_per_job": 2}, ["cluster.replica_count=2"], "nodes meet once"),
        ({"grid": {"train.max_steps": [5, 6]}}, ["data.tasks=2"], "data.tasks: found 2 with sweep"),
        (
            {"grid": {"train.max_steps": [5, 6]}},
            ["cluster.capacity_fallback=[{scheduling_strategy: spot}, {scheduling_strategy: standard}]"],
            "cluster.capacity_fallback: found with sweep",
        ),
        ({"variants": {"a": {}, "b": {"train.epochs": 0, "model.lora": {"rank": 2}}}}, [], "found 0 with model.lora"),
    ],
)  # fmt: skip
def test_what_could_not_be_compared_is_refused(sweep: object, overrides: list[str], said: str) -> None:
    assert said in refusal(sweep, *overrides)


def test_stages_before_the_last_are_shared() -> None:
    assert "a: changes stage base, which all variants share; expected fields of stages.relevance" in refusal(
        {"variants": {"a": {"train.optimizer.weight_decay": 0.1}, "b": {}}}, stages=True
    )
    config = load({"grid": {CHANNELS: [["rgb"], ["all"]]}}, stages=True)
    assert names(config) == ["channels-1", "channels-2"]


def test_settings_that_relevance_does_not_read_make_no_variant() -> None:
    frozen = {
        f"{RELEVANCE}.allocation": "uniform",
        f"{RELEVANCE}.estimator": "none",
        EPOCHS: 0,
    }
    variants = {"a": {**frozen, CHANNELS: ["rgb"]}, "b": {**frozen, CHANNELS: ["all"]}}
    assert "b: trains the same as a" in refusal({"variants": variants}, stages=True)
    # The same set of channels under another name:
    same = {"a": {CHANNELS: ["arr13_unique", "red"]}, "b": {CHANNELS: ["arr13_unique"]}}
    assert "b: trains the same as a" in refusal({"variants": same}, stages=True)


def test_a_module_that_could_not_learn_is_for_variants_that_train_nothing() -> None:
    idle = {f"{RELEVANCE}.estimator": "none"}
    said = refusal({"variants": {"a": {}, "b": idle}}, stages=True)
    assert "relevance could not learn: all parts of the base are frozen" in said
    load({"variants": {"a": {}, "b": {**idle, EPOCHS: 0}}}, stages=True)


def test_a_run_file_with_a_sweep_is_another_one_and_its_gate_is_not_missed() -> None:
    config = load({"grid": {"train.max_steps": [5, 6]}}, "gate.min_exact_match=0")
    assert config.digest() != load_run_file(DIGITS, [ONE_NODE, "gate.min_exact_match=0"]).digest()
    assert RunConfig.model_validate(config.to_dict()) == config
    assert not [one for one in warnings(config) if one.field == "gate"]


@pytest.mark.parametrize("name", ["scorers", "texture_channels", "level_of_detail"])
def test_shipped_sweeps_have_their_variants(name: str) -> None:
    config = load_run_file(ROOT / f"configs/sweeps/{name}.yaml")
    assert config.sweep
    trained = [variant for variant in variants_of(config.sweep) if config.variant(variant).stage_runs()["relevance"]]
    counts = {"scorers": 11, "texture_channels": 22, "level_of_detail": 11}
    assert (len(trained), config.sweep.starts, len(config.sweep.hypotheses)) == (counts[name], 3, 3)
