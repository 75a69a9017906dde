"""The family hf in training runs: every strategy equals one process, packed equals unpacked, resumed and exported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText

from tests.support.hf.publish import model_section
from tests.support.hf.published import config_of
from tests.support.short_form import WHOLE
from tests.support.trainer.native_models import write_data
from tests.support.trainer.runs import encode_features, losses, make_run, run_ranks, summary, train_runs
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.storage import open_storage

pytest_plugins = ("tests.support.hf.published",)

RELATIVE = 1e-5
STEPS, STOP_STEP = 4 if WHOLE else 2, 2
CACHED = {"features.cache": "on"}
ADAPTERS = {"model.lora": {"rank": 4}}
SPLIT = {"train.strategy": "tp", "train.tensor_parallel": 2}
STAGES = {"train.strategy": "pp", "train.pipeline_parallel": 2}
CONTEXT = {"train.context_parallel": 2}
MORE: dict[str, dict[str, Any]] = {
    "ddp": {"train.strategy": "ddp"},
    "checkpointing": {"train.activation_checkpointing": "selective"},
    "hsdp": {"train.strategy": "hsdp"},
    "full": {"train.activation_checkpointing": "full"},
    "lora": ADAPTERS,
    "lora-ddp": ADAPTERS | {"train.strategy": "ddp"},
    "qlora": {"model.lora": {"rank": 4, "quantize_base": "nf4"}},
    "tower": {"model.freeze": []},
    "tower-ddp": {"model.freeze": [], "train.strategy": "ddp"},
    "bf16": {"train.precision": "bf16"},
    **{name: {"train.strategy": name} for name in ("zero1", "zero2", "zero3")},
    **{f"cached-{name}": CACHED | {"train.strategy": name} for name in ("ddp", "zero2", "zero3")},
    "cached-lora": CACHED | ADAPTERS,
    "context-cached": CACHED | CONTEXT,
    "context-zero3": CONTEXT | {"train.strategy": "zero3", "train.activation_checkpointing": "full"},
    "context-lora": CONTEXT | ADAPTERS,
    "pp-cached": CACHED | STAGES,
    "pp-lora": STAGES | ADAPTERS,
    "pp-tower": STAGES | {"model.freeze": [], "train.activation_checkpointing": "full"},
    "tp-whole": SPLIT,
    "context-tower": CONTEXT | {"model.freeze": [], "train.strategy": "ddp"},
}

ALIKE = (
    "ddp",
    "checkpointing",
    "hsdp",
    "full",
    "cached-ddp",
    "context-cached",
    "pp-cached",
    "tp-whole",
)  # trained as the reference is


@pytest.fixture(scope="module")
def runs(published: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, JobConfig]:
    """Samples with none, one or two images. Packed sequences all have some: what ranks without any do is held by
    tests/integration/trainer/strategies/test_collective_order.py."""
    root = tmp_path_factory.mktemp("runs")
    base = {
        "model": model_section(published("internvl")),
        "data": {**write_data(root / "data"), "validation_fraction": 0.3},
        "features.cache": "off", "train.global_batch_size": 4, "train.micro_batch_size": 1, "train.max_steps": STEPS,
        "train.strategy": "fsdp", "train.epochs": 4,
    }  # fmt: skip
    whole = base | {"train.strategy": "ddp", "train.micro_batch_size": 4, "train.loss_chunk_tokens": 0}
    unpacked = whole | {"data.pack": False, "train.global_batch_size": 64, "train.max_steps": 1}
    packed = whole | {"train.global_batch_size": 64, "train.max_steps": 1}
    alone = {name: make_run(root, name, changes, features="off") for name, changes in {
        "reference": whole, "packed": packed, "unpacked": unpacked,
    }.items()}  # fmt: skip
    train_runs(list(alone.values()), processes=1)
    two = {
        "fsdp": base,
        "tp": base | SPLIT | {"train.sequence_parallel": True},
        "pp": base | STAGES,
        "context": base | CONTEXT,
    }
    cached = make_run(root, "cached", base | CACHED)
    encode_features(cached)
    jobs = {name: make_run(root, name, changes, features="off") for name, changes in two.items()} | {"cached": cached}
    begun = make_run(root, "resumed", base | {"train.max_steps": STOP_STEP}, features="off")
    train_runs([*([begun] if WHOLE else []), *jobs.values()], processes=2)
    if WHOLE:
        jobs |= {
            name: make_run(root, name, base | changes, features="reuse" if "cached" in name else "off")
            for name, changes in MORE.items()
        }
        alone["adapted"] = make_run(root, "adapted", whole | ADAPTERS, features="off")
        alone["trained"] = make_run(root, "trained", whole | {"model.freeze": []}, features="off")
        train_runs([alone["adapted"], alone["trained"]], processes=1)
        by_engine = [[jobs[name] for name in MORE if ("zero" in name) == is_zero] for is_zero in (False, True)]
        for several in by_engine:
            train_runs(several, processes=2)
        jobs["resumed"] = make_run(root, "resumed", base, features="off")
        train_runs([jobs["resumed"]], processes=2)
    return alone | jobs


def test_every_strategy_equals_one_process(runs: Mapping[str, JobConfig]) -> None:
    expected = losses(runs["reference"])
    assert len(set(expected)) == STEPS
    more = [name for name in MORE if name in ALIKE or "zero" in name] if WHOLE else []
    for name in ("fsdp", "tp", "pp", "context", "cached", *more):
        assert losses(runs[name]) == pytest.approx(expected, rel=RELATIVE), name


@pytest.mark.slow
def test_adapters_and_a_trained_tower_equal_one_process(runs: Mapping[str, JobConfig]) -> None:
    for name, reference in {
        "lora": "adapted",
        "lora-ddp": "adapted",
        "cached-lora": "adapted",
        "context-lora": "adapted",
        "context-tower": "trained",
        "pp-lora": "adapted",
        "pp-tower": "trained",
        "tower": "trained",
        "tower-ddp": "trained",
    }.items():
        assert losses(runs[name]) == pytest.approx(losses(runs[reference]), rel=RELATIVE), name
    assert losses(runs["adapted"])[1:] != pytest.approx(losses(runs["reference"])[1:], rel=RELATIVE)
    assert losses(runs["trained"])[1:] != pytest.approx(losses(runs["reference"])[1:], rel=RELATIVE)
    assert losses(runs["qlora"]) == pytest.approx(losses(runs["adapted"]), rel=0.02)
    assert losses(runs["bf16"]) == pytest.approx(losses(runs["reference"]), rel=0.02)


def test_packed_equals_unpacked(runs: Mapping[str, JobConfig]) -> None:
    assert summary(runs["packed"])["tokens"] == summary(runs["unpacked"])["tokens"]
    assert losses(runs["packed"]) == pytest.approx(losses(runs["unpacked"]), rel=RELATIVE)


@pytest.mark.slow  # places in the data of native models, which are read alike: test_native_models.py
def test_resumed_equals_uninterrupted(runs: Mapping[str, JobConfig]) -> None:
    assert summary(runs["resumed"])["resumed_from_step"] == STOP_STEP
    assert losses(runs["resumed"]) == losses(runs["fsdp"])


def test_an_export_loads_in_plain_transformers_and_is_evaluated(runs: Mapping[str, JobConfig]) -> None:
    job = runs["fsdp"]
    sync_run(job)
    run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", f"{job.run.run_uri}/run.json"], processes=1)
    storage = open_storage(job.run.run_uri)
    _, info = AutoModelForImageTextToText.from_pretrained(storage.uri("export"), output_loading_info=True)
    assert not any(info.values())
    result = json.loads(storage.read("evaluate.json"))
    assert result["questions"] > 3 and 0 < result["loss"] < 10
    assert set(result["controls"]) == {"shuffled_image", "no_image"}
    again = config_of(Path(storage.uri("export")))
    of_export, of_source = (image_form_of(one).published for one in (again, job.model))
    assert of_export and of_source and of_export.rule() == of_source.rule()
