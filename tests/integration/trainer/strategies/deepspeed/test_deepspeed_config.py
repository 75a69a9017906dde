"""DeepSpeed's configuration is derived from the run file, and takes what the run file does not decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from tests.support.short_form import only_whole
from tests.support.trainer.equalities import HELD_OUT
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import make_run, metrics, train_runs
from vlmpipe.pipelines.checks.deepspeed_values import deepspeed_verdict
from vlmpipe.trainer.config import deepspeed_keys
from vlmpipe.trainer.config.deepspeed_keys import DECIDED_HERE
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.sizing.deepspeed_config import Sizes, engine_settings, laid_over
from vlmpipe.trainer.strategies.deepspeed.values import require_values

GIVEN = {"zero_optimization": {"overlap_comm": False}, "wall_clock_breakdown": True}
SEVERAL_BUCKETS = {"zero_optimization": {"reduce_bucket_size": 10_000}}  # of some 30,000 trained parameters
NODES, RANKS = 2, 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    """On one process; under ZeRO-3 on two nodes of two; and there with all that is about DeepSpeed."""
    root = tmp_path_factory.mktemp("settings")
    common = {"train.max_steps": 4, "features.cache": "off"}
    # Validated is the average, after whose losses the nodes' copies must be of the weights again.
    zero = {"train.strategy": "zero3", "train.micro_batch_size": 1, "train.ema_decay": 0.6, **HELD_OUT}
    own = {"train.zero_hpz": True, "train.deepspeed": GIVEN}
    buckets = {"train.strategy": "zero2", "train.micro_batch_size": 1, "train.deepspeed": SEVERAL_BUCKETS}
    changes = {
        "reference": common | EVERY_STEP,
        "plain": common | zero,
        "given": common | zero | own,
        "overlapped": common | buckets,
    }
    jobs = {name: make_run(root, name, each, features="off") for name, each in changes.items()}
    train_runs([jobs["reference"]], processes=1)
    train_runs([jobs["given"], jobs["plain"], jobs["overlapped"]], processes=RANKS, nodes=NODES)
    return jobs


@only_whole
@pytest.mark.parametrize("name", ["plain", "given"])
def test_with_a_copy_in_each_node_and_settings_of_a_users_own_zero3_equals_one_process(
    name: str, runs: dict[str, JobConfig]
) -> None:
    require_equal_training(runs[name], runs["reference"])
    validated, expected = (
        [line["validation_loss"] for line in metrics(runs[each]) if "validation_loss" in line]
        for each in (name, "plain")
    )
    assert expected and validated == pytest.approx(expected, rel=1e-5)


@only_whole
def test_with_several_buckets_reductions_overlap_and_no_number_changes(runs: dict[str, JobConfig]) -> None:
    used = json.loads(Path(runs["overlapped"].run.run_uri, "deepspeed.json").read_text(encoding="utf-8"))[
        "zero_optimization"
    ]
    assert used["overlap_comm"] and used["reduce_bucket_size"] == 10_000
    require_equal_training(runs["overlapped"], runs["reference"])


@pytest.mark.parametrize(
    ("changes", "trainable", "overlaps"),
    [
        ({"strategy": "zero2"}, 10**9, True),
        ({"strategy": "zero1", "precision": "bf16-autocast"}, 10**9, True),
        ({"strategy": "zero1", "precision": "bf16"}, 10**9, False),  # DeepSpeed's BF16_Optimizer
        ({"strategy": "zero2"}, 10**8, False),  # one bucket takes all
        ({"strategy": "zero2", "offload": "optimizer", "precision": "fp32"}, 10**9, False),
        ({"strategy": "zero3"}, 10**8, True),
        ({"strategy": "zero3", "deepspeed": {"zero_optimization": {"overlap_comm": False}}}, 10**9, False),
    ],
)
def test_reductions_overlap_where_there_are_several_buckets(
    changes: dict[str, Any], trainable: int, overlaps: bool
) -> None:
    config = TrainConfig.model_validate({"global_batch_size": 2, "optimizer": {"learning_rate": 1e-3}} | changes)
    sizes = Sizes(trainable, layer=100, vector=10)
    derived = engine_settings(config, stage=int(config.strategy[-1]), micro_steps=1, sizes=sizes)["zero_optimization"]
    used = derived | config.deepspeed.get("zero_optimization", {})
    assert used["overlap_comm"] == overlaps
    buckets = 2 if overlaps and config.strategy != "zero3" else 1
    assert buckets * used["reduce_bucket_size"] <= 500_000_000


@only_whole
def test_the_file_says_what_was_used(runs: dict[str, JobConfig]) -> None:
    with_it, without = (
        json.loads(Path(runs[name].run.run_uri, "deepspeed.json").read_text(encoding="utf-8"))
        for name in ("given", "plain")
    )
    assert with_it.pop("wall_clock_breakdown") and not without.pop("wall_clock_breakdown")
    zero_with, zero_without = with_it.pop("zero_optimization"), without.pop("zero_optimization")
    assert with_it == without
    assert zero_with == zero_without | {"overlap_comm": False, "zero_hpz_partition_size": RANKS}
    assert (without["train_batch_size"], zero_without["stage"]) == (8, 3)


def settings(strategy: str, deepspeed: dict[str, Any]) -> TrainConfig:
    optimizer = {"learning_rate": 1e-3}
    return TrainConfig.model_validate(
        {"global_batch_size": 2, "optimizer": optimizer, "strategy": strategy, "deepspeed": deepspeed}
    )


@pytest.mark.parametrize("key", DECIDED_HERE)
def test_what_the_run_file_decides_is_refused_with_the_field_that_does(key: str) -> None:
    outer, _, inner = key.partition(".")
    with pytest.raises(ValidationError) as caught:
        settings("zero2", {outer: {inner: 1} if inner else 1})
    assert f"deepspeed.{key} is decided by {DECIDED_HERE[key]}" in str(caught.value)


class Recorded(dict[str, Any]):
    """A configuration that remembers which keys were asked for."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def test_each_key_that_this_deepspeed_knows_has_a_verdict_here() -> None:
    """A new release's keys would pass unseen, or be called unknown."""
    given = Recorded({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}})
    DeepSpeedConfig(given)
    assert {"zero_optimization", "fp16", "pipeline", "checkpoint", "steps_per_print"} <= given.asked
    fields = (field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items())
    known = given.asked | {f"zero_optimization.{name}" for name in fields}
    verdicts = {*deepspeed_keys.DECIDED_HERE, *deepspeed_keys.PASSED_ON, *deepspeed_keys.NOT_HERE}
    removed = set(_REMOVED_TOP_LEVEL_CONFIG_KEYS)  # which DeepSpeed itself refuses, and we as unknown
    assert known - verdicts - removed == set()


GUIDES = {
    "train_batch_size": 128, "gradient_clipping": 1.0, "fp16": {"enabled": True}, "steps_per_print": 100,
    "checkpoint": {"use_node_local_storage": True}, "pipeline": {"stages": 4}, "wall_clock_brakedown": True,
    "zero_optimization": {
        "stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto", "overlap_com": True,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}  # fmt: skip


def test_all_that_is_wrong_with_a_guides_configuration_is_said_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        settings("zero2", GUIDES)
    said = str(caught.value)
    for text in (
        "deepspeed.train_batch_size is decided by train.global_batch_size",
        "deepspeed.fp16 is decided by train.precision",
        "deepspeed.checkpoint is decided by section checkpoint",
        "deepspeed.pipeline is decided by train.strategy pp",
        "deepspeed.wall_clock_brakedown is not known to DeepSpeed, which would ignore it; did you mean wall_clock_brea",
        "deepspeed.zero_optimization.overlap_com is not known",
        "deepspeed.zero_optimization.reduce_bucket_size: found auto",
        "deepspeed.zero_optimization.stage3_gather_16bit_weights_on_model_save would have no effect",
    ):
        assert text in said
    assert "steps_per_print" not in said and "overlap_comm is" not in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"zero_optimization": {"reduce_bucket_size": "many", "overlap_comm": "perhaps"}},
            "reduce_bucket_size: .*; ov",
        ),
        ({"timers": {"throughput": {"enabled": "perhaps"}}}, "perhaps"),
    ],
)
def test_a_value_that_deepspeed_refuses_is_a_sentence_before_an_engine_is_built(
    given: dict[str, Any], said: str
) -> None:
    train = settings("zero2", given)
    derived = engine_settings(train, stage=2, micro_steps=1, sizes=Sizes(1000, 100, 10))
    assert derived["train_batch_size"] > derived["train_micro_batch_size_per_gpu"], "of several ranks"
    require_values(derived)
    with pytest.raises(ConfigError, match=said):
        require_values(laid_over(derived, given))


def test_check_asks_deepspeed_in_another_process() -> None:
    state, text, code = deepspeed_verdict(settings("zero2", {"zero_optimization": {"reduce_bucket_size": -5}}))
    assert (state, code) == ("failed", 64) and "reduce_bucket_size" in text
    assert deepspeed_verdict(settings("zero3", GIVEN))[0] == "ok"


def test_it_is_for_deepspeed_alone() -> None:
    assert settings("zero1", {"wall_clock_breakdown": True}).deepspeed
    with pytest.raises(ValidationError, match="deepspeed does not apply to strategy fsdp"):
        settings("fsdp", {"wall_clock_breakdown": True})
    with pytest.raises(ValidationError, match="found 3, expected a mapping"):
        settings("zero1", {"zero_optimization": 3})


def test_hpz_is_refused_where_it_cannot_work() -> None:
    base = {"global_batch_size": 2, "optimizer": {"learning_rate": 1e-3}, "strategy": "hsdp", "zero_hpz": True}
    with pytest.raises(ValidationError, match="zero_hpz does not work with strategy hsdp: use zero3"):
        TrainConfig.model_validate(base)
