"""Settings without effect are warned of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.config.rules.warnings import delta_rules, rates_without_effect, unbalanced_routers
from vlmpipe.config.run_config import parse_run_config, warnings
from vlmpipe.pipelines.check import check_run
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.planner.plan import plan_run
from vlmpipe.trainer.sizing.model_shape import DeltaRules

RATES = {"train.optimizer.tower_learning_rate": 1e-6, "train.optimizer.projector_learning_rate": 1e-5}


@pytest.mark.parametrize(
    ("model", "idle"),
    [
        ({"freeze": ["tower"]}, {"tower"}),
        ({"freeze": ["projector"]}, {"projector"}),
        ({"freeze": ["tower", "projector"]}, {"tower", "projector"}),
        ({"freeze": []}, set()),
        ({"freeze": ["tower"], "train_parameters": ["*norm*"]}, set()),
        ({"freeze": ["projector"], "lora": {"rank": 2, "parts": ["tower"]}}, {"projector"}),
    ],
)
def test_the_rate_of_a_frozen_part_has_no_effect(model: dict[str, Any], idle: set[str]) -> None:
    changes = {f"model.{name}": value for name, value in model.items()} | {"features.cache": "off"}
    config = parse_run_config(merged(TINY, changes | RATES), "a test")
    found = {one.field: str(one) for one in warnings(config) if one.field.endswith("_learning_rate")}
    assert found.keys() == {f"train.optimizer.{part}_learning_rate" for part in idle}
    assert all("has no effect" in text for text in found.values())
    assert not [one for one in warnings(parse_run_config(merged(TINY, changes), "a test")) if one.field in found]


@pytest.mark.parametrize(
    ("model", "idle"),
    [
        ({"freeze": ["tower"], "freeze_parameters": ["*projector*"]}, ["projector"]),
        ({"freeze": ["tower"], "freeze_parameters": ["*projector*weight"]}, []),
        ({"freeze": ["tower"], "train_parameters": ["*language_model*norm*"]}, ["tower"]),
        ({"freeze": ["tower"]}, []),
    ],
)
def test_the_rate_of_a_part_that_patterns_freeze_as_a_whole_has_no_effect(
    model: dict[str, Any], idle: list[str]
) -> None:
    """Which is known once the model is: by `plan` and `check`."""
    changes = {f"model.{name}": value for name, value in model.items()}
    config = parse_run_config(merged(TINY, changes | RATES), "a test")
    found = rates_without_effect(config, architecture(config).shape)
    assert [one.field for one in found] == [f"train.optimizer.{part}_learning_rate" for part in idle]
    if idle == ["projector"]:
        assert set(map(str, found)) <= {finding.text for finding in check_run(config) if finding.state == "warning"}
        assert set(map(str, found)) <= set(plan_run(config).notes)


@pytest.mark.parametrize(("root", "warns"), [("runs", True), ("gs://bucket/runs", False), ("s3://bucket/runs", False)])
def test_reading_of_shards_in_a_folder_has_no_choice(root: str, warns: bool) -> None:
    changes = {"data.shard_reading": "ranges", "output.root_uri": root}
    found = [str(one) for one in warnings(parse_run_config(merged(TINY, changes), "a test"))]
    assert any("data.shard_reading: has no effect" in text for text in found) == warns
    assert not any("shard_reading" in str(one) for one in warnings(parse_run_config(merged(TINY, {}), "a test")))


WARM_UPS = [({"train.warmup_steps": 3, "train.warmup_fraction": None}, True), ({"train.warmup_fraction": 0.1}, False)]


@pytest.mark.parametrize(("given", "warns"), WARM_UPS)
def test_the_form_of_a_warm_up_that_is_not_searched_has_no_effect(given: dict[str, Any], warns: bool) -> None:
    shares = {"train.warmup_fraction": {"double_value_spec": {"min_value": 0.0, "max_value": 0.2}}}
    config = parse_run_config(merged(TINY, {"tune": {"parameters": shares}, **given}), "a test")
    found = [one.text for one in warnings(config) if one.field == "train.warmup_steps"]
    assert found == (["has no effect on trials: tune searches train.warmup_fraction"] if warns else [])


def test_what_a_models_layers_are_trained_without_is_said() -> None:
    train: Any = SimpleNamespace(router_loss=0.0, trainer=None)
    config: Any = SimpleNamespace(train=train, cluster=SimpleNamespace(accelerator_count=1))
    shape: Any = SimpleNamespace(routers=3, delta_rules=DeltaRules(24, 254_738, 20_800))
    (routers,) = unbalanced_routers(config, shape)
    assert "the experts of 3 routers are trained without a loss that balances them" in str(routers)
    (rules,) = delta_rules(config, shape)
    assert "24 layers" in str(rules) and "255 kB a token and layer" in str(rules) and "21 kB" in str(rules)
    train.router_loss, config.cluster.accelerator_count = 0.01, 0
    assert not unbalanced_routers(config, shape) and not delta_rules(config, shape)


@pytest.mark.parametrize(("objective", "is_said"), [("sft", False), ("dpo", True)])
def test_slices_of_preference_pairs_compare_answers(objective: str, is_said: bool) -> None:
    validations = {"train.validate_every_steps": 0} if is_said else {}
    changes = {"train.objective": objective, "data.slices": ["camera"], "data.source": "a.json"} | validations
    found = [
        str(one) for one in warnings(parse_run_config(merged(TINY, changes), "a test")) if one.field == "data.slices"
    ]
    assert bool(found) == is_said and all("preference_accuracy has no slices" in text for text in found)
