"""DeepSpeed's configuration is derived from the run file, and takes what the run file does not decide."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from tests.support.paths import ROOT
from tests.support.trainer.equalities import HELD_OUT
from tests.support.trainer.numeric_equality import EVERY_STEP, require_equal_training
from tests.support.trainer.runs import make_run, metrics, train_runs
from vlmpipe.config.run_config import RunFileError, load_run_file
from vlmpipe.pipelines.checks import deepspeed_values
from vlmpipe.pipelines.checks.deepspeed_values import deepspeed_verdict, with_values
from vlmpipe.trainer.config import deepspeed_keys
from vlmpipe.trainer.config.deepspeed_keys import DECIDED_HERE
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.sizing.deepspeed_config import Sizes, engine_settings, laid_over
from vlmpipe.trainer.strategies.deepspeed.values import require_values, value_problems

NODES, RANKS = 2, 2
GIVEN = {
    "zero_optimization": {"overlap_comm": False, "zero_hpz_partition_size": RANKS},
    "wall_clock_breakdown": True,
}
SEVERAL_BUCKETS = {"zero_optimization": {"reduce_bucket_size": 10_000}}  # of some 30,000 trained parameters


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    """On one process; under ZeRO-3 on two nodes of two; and there with all that is about DeepSpeed."""
    root = tmp_path_factory.mktemp("settings")
    common = {"train.max_steps": 4, "features.cache": "off"}
    # Validated is the average, after whose losses the nodes' copies must be of the weights again.
    zero = {"train.strategy": "zero3", "train.micro_batch_size": 1, "train.ema_decay": 0.6, **HELD_OUT}
    own = {"train.deepspeed": GIVEN}
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert f"{key} is decided by {DECIDED_HERE[key]}" in str(caught.value)


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
        "train_batch_size is decided by train.global_batch_size",
        "fp16 is decided by train.precision",
        "checkpoint is decided by section checkpoint",
        "pipeline is decided by train.strategy pp",
        "wall_clock_brakedown is not known to DeepSpeed, which would ignore it; did you mean wall_clock_brea",
        "zero_optimization.overlap_com is not known",
        "zero_optimization.reduce_bucket_size: found auto",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save would have no effect",
    ):
        assert text in said
    assert "steps_per_print" not in said and "overlap_comm is" not in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "reduce_bucket_size: Input should be greater than 0"),
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


def test_all_values_that_deepspeed_refuses_or_would_ignore_are_said_at_once() -> None:
    given = {
        "zero_optimization": {"reduce_bucket_size": 0, "overlap_comm": True},
        "timers": {"throughput": {"enabled": "perhaps"}},
        "comms_logger": {"enabled": True, "nonsense": 1},
        "aio": {"block_size": 1048576, "blok_size": 1},
        "flops_profiler": {"enabled": True, "stepp": 1},
    }
    said = value_problems(settings("zero2", given))
    expected = (
        "zero_optimization: reduce_bucket_size: ",
        "timers: enabled: ",
        "comms_logger: nonsense: ",
        "aio.blok",
        "f",
    )
    assert len(said) == len(expected) and all(map(str.startswith, said, expected))
    assert value_problems(settings("zero2", {**GIVEN, "timers": {"throughput": {"enabled": True}}})) == []


def test_keys_without_effect_are_those_that_deepspeeds_engine_does_not_read_under_a_stage() -> None:
    source = inspect.getsource(DeepSpeedEngine._configure_zero_optimizer)
    of_1_and_2, of_3 = source.split("elif zero_stage == ZeroStageEnum.weights:")
    others = {"stage3_use_all_reduce_for_fetch_params": "zero3", "log_trace_cache_warnings": "zero3"}
    accessors = {"use_multi_rank_bucket_allreduce": "zero_multi_rank_bucket_allreduce",
                 "enable_sanity_checks": "is_sanity_checks_enabled",
                 "zero_hpz_partition_size": "zero_hpz_partition_size"}  # fmt: skip
    for key in deepspeed_keys.PASSED_ON:
        section, _, name = key.partition(".")
        if section != "zero_optimization" or not name or name in others:
            continue
        accessor = f"self.{accessors.get(name, 'zero_' + name.removeprefix('stage3_'))}()"
        for strategy, text in (("zero1", of_1_and_2), ("zero2", of_1_and_2), ("zero3", of_3)):
            assert bool(deepspeed_keys.ignored_under(key, strategy)) == (accessor not in text), (key, strategy)


def test_kinds_of_values_are_those_of_deepspeeds_own_class() -> None:
    kinds = {"bool": "switch", "int": "count", "Optional[bool]": "switch"}
    for name, field in DeepSpeedZeroConfig.model_fields.items():
        kind = deepspeed_keys.PASSED_ON.get(f"zero_optimization.{field.alias or name}")
        annotation = (
            getattr(field.annotation, "__name__", "") if isinstance(field.annotation, type) else "Optional[bool]"
        )
        assert kind in (None, kinds.get(annotation)), name


@pytest.mark.parametrize("kind", get_args(deepspeed_keys.Kind))
def test_a_value_of_another_kind_is_refused_when_the_file_is_read(kind: str) -> None:
    """Plans read some of them: one of another kind ended `check` with a traceback."""
    good = {"switch": True, "count": 5e8, "steps": 1, "number": 0.5, "level": "info", "section": {}}
    bad = {"switch": "perhaps", "count": "many", "steps": 0, "number": 0, "level": "loud", "section": 3}
    for name in (name for name, of in deepspeed_keys.PASSED_ON.items() if of == kind):
        outer, _, inner = name.partition(".")
        assert settings("zero2", {outer: {inner: good[kind]} if inner else good[kind]}).deepspeed
        with pytest.raises(ValidationError, match=f"{name}: found .*, expected {deepspeed_keys.EXPECTED[kind]}"):
            settings("zero2", {outer: {inner: bad[kind]} if inner else bad[kind]})


def test_check_asks_deepspeed_in_another_process() -> None:
    state, text, code = deepspeed_verdict(settings("zero2", {"zero_optimization": {"reduce_bucket_size": 0}}))
    assert (state, code) == ("failed", 64) and "reduce_bucket_size" in text


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        (
            "import json; print(json.dumps({'missing': 'No module named deepspeed'}))",
            "cannot be imported here (No modul",
        ),
        (
            "raise RuntimeError('of its own')",
            "reading train.deepspeed by DeepSpeed's classes failed: RuntimeError: of its",
        ),
    ],
)
def test_deepspeed_that_is_missing_is_told_from_a_check_that_fails(
    reader: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_reader(reader, tmp_path, monkeypatch)
    state, text, code = deepspeed_verdict(settings("zero3", GIVEN))
    assert (state, code) == ("unchecked", 0) and said in text
    assert text.endswith("training reads it when it starts, and ends with exit code 64 where DeepSpeed refuses it")


def stand_in_reader(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the one that takes seconds to import DeepSpeed."""
    (folder / "stand_in_reader.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(deepspeed_values, "READER", "stand_in_reader")


def test_values_that_deepspeed_accepts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_reader("print('{\"problems\": []}')", tmp_path, monkeypatch)
    accepted = "DeepSpeed accepts train.deepspeed: zero_optimization, wall_clock_breakdown"
    assert deepspeed_verdict(settings("zero3", GIVEN)) == ("ok", accepted, 0)


def test_keys_and_values_are_refused_in_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = "import json, sys; print(json.dumps({'problems': ['timers: ' + str(json.load(sys.stdin)['deepspeed'])]}))"
    stand_in_reader(judge, tmp_path, monkeypatch)
    given_values = {"timers": {"throughput": {"enabled": "perhaps"}}}
    given = {"fp16": {"enabled": True}, **given_values}
    overrides = ["train.strategy=zero2", f"train.deepspeed={json.dumps(given)}", "train.no_such_key=1"]
    digits = ROOT / "configs/digits.yaml"
    with pytest.raises(RunFileError) as refused:
        load_run_file(digits, overrides)
    said = [(one.field, one.text) for one in with_values(refused.value, digits, overrides).problems]
    assert [field for field, _ in said] == ["train.deepspeed", "train.no_such_key", "train.deepspeed"]
    assert "fp16 is decided by train.precision" in said[0][1] and said[2][1] == f"timers: {given_values}"
    with pytest.raises(RunFileError) as other:
        load_run_file(digits, ["train.no_such_key=1"])
    assert with_values(other.value, digits, ["train.no_such_key=1"]) is other.value


def test_it_is_for_deepspeed_alone() -> None:
    assert settings("zero1", {"wall_clock_breakdown": True}).deepspeed
    with pytest.raises(ValidationError, match="does not apply to strategy fsdp: take it out"):
        settings("fsdp", {"wall_clock_breakdown": True})
    with pytest.raises(ValidationError, match="found 3, expected a mapping"):
        settings("zero1", {"zero_optimization": 3})
