"""Ranks ask for the same collectives in the same order, whatever their data: else they hang or add wrong numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf.kinds import INSTALLED
from tests.support.hf.publish import model_section as hf_section
from tests.support.hf.publish import publish
from tests.support.short_form import chosen
from tests.support.trainer.native_models import SIZES, picture
from tests.support.trainer.runs import encode_features, losses, make_run, run_ranks
from tests.support.trainer.tiny_native import CONFIGS
from tests.support.trainer.tiny_native import model_section as native_section
from tests.support.trainer.tiny_runs import TINY
from vlmpipe.trainer.config.job import JobConfig

SAMPLES, TOWER, ADAPTERS = 23, {"model.freeze": []}, {"model.lora": {"rank": 4}}
EMBEDDING = {"model.freeze": ["tower"], "model.freeze_parameters": ["*embed_tokens*"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"train.strategy": "ddp"},
    "ddp tower bf16": TOWER | {"train.strategy": "ddp", "train.precision": "bf16"},
    "ddp adapters bf16": ADAPTERS | {"train.strategy": "ddp", "train.precision": "bf16"},
    "fsdp": {"train.strategy": "fsdp"},
    "fsdp tower": TOWER | {"train.strategy": "fsdp"},
    "fsdp adapters": ADAPTERS | {"train.strategy": "fsdp"},
    "fsdp embedding": EMBEDDING | {"train.strategy": "fsdp"},
    "fsdp frozen shards": {"train.strategy": "fsdp", "train.shard_frozen_weights": True},
    "fsdp cached": {"train.strategy": "fsdp", "features.cache": "on"},
    "fsdp checkpointing": TOWER | {"train.strategy": "fsdp", "train.activation_checkpointing": "full"},
    "hsdp tower": TOWER | {"train.strategy": "hsdp"},
    "zero1 tower": TOWER | {"train.strategy": "zero1"},
    "zero2": {"train.strategy": "zero2"},
    "zero2 tower": TOWER | {"train.strategy": "zero2"},
    "zero3": {"train.strategy": "zero3"},
    "zero3 tower": TOWER | {"train.strategy": "zero3"},
    "zero3 adapters": ADAPTERS | {"train.strategy": "zero3"},
    "zero3 cached": {"train.strategy": "zero3", "features.cache": "on"},
}
FAMILIES = ("llava", *CONFIGS, *INSTALLED)
SHORT_FAMILIES, SHORT_SETTINGS = ("llava", "smolvlm", "qwen2_5_vl", "qwen3_vl", "gemma3"), ("fsdp embedding", "zero3")
CASES = chosen({family: family for family in FAMILIES}, lambda name: name in SHORT_FAMILIES)
WAYS = chosen(SETTINGS, lambda name: name in SHORT_SETTINGS)
PLAIN = {"train.strategy": "ddp", "train.micro_batch_size": 4}
RELATIVE, RELATIVE_BF16 = 1e-5, 0.02


def write_mixed(folder: Path) -> dict[str, Any]:
    """Records of which each third has a picture, one to a sequence: many steps have pictures on one rank only."""
    folder.mkdir()
    records = []
    for number in range(SAMPLES):
        question = f"which number is this, {number} or {number + 1}?"
        record: dict[str, Any] = {"id": f"sample-{number:02}"}
        if number % 3 == 0:
            (folder / f"{number}.png").write_bytes(picture(number, SIZES[number % len(SIZES)]))
            record["image"], question = f"{number}.png", f"<image>\n{question}"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": f"it is {number}"}]
        records.append(record | {"conversations": turns})
    (folder / "records.json").write_text(json.dumps(records))
    return {"source": str(folder / "records.json"), "image_folder": str(folder), "pack": False, "sequence_length": 256}


@pytest.fixture(scope="module", params=CASES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, JobConfig]:
    """Of one family: a run of two ranks for each setting, and of one process for each that changes the loss."""
    root = tmp_path_factory.mktemp(request.param)
    base = {
        "model": model_of(request.param, root),
        "data": write_mixed(root / "data") | {"validation_fraction": 0}, "features.cache": "off",
        "train.global_batch_size": 4, "train.micro_batch_size": 1, "train.max_steps": 0, "train.epochs": 1,
    }  # fmt: skip
    references = {reference_of(changes): of_the_loss(changes) for changes in WAYS.values()}
    plain = {name: run(root, f"plain {name}", base | changes | PLAIN) for name, changes in references.items()}
    train_traced(plain.values(), processes=1)
    made = {name: run(root, name, base | changes) for name, changes in WAYS.items()}
    if cached := next((job for name, job in made.items() if "cached" in name), None):
        encode_features(cached)
    for is_zero in (False, True):
        train_traced([job for name, job in made.items() if name.startswith("zero") == is_zero], processes=2)
    return made | {f"plain {name}": job for name, job in plain.items()}


def model_of(family: str, root: Path) -> dict[str, Any]:
    if family == "llava":
        return dict(TINY["model"])
    return native_section(family) if family in CONFIGS else hf_section(publish(family, root / "model"))


def run(root: Path, name: str, changes: Mapping[str, Any]) -> JobConfig:
    features = "reuse" if changes["features.cache"] == "on" else "off"
    return make_run(root, name.replace(" ", "-").replace(":", "-"), dict(changes), features=features)


def train_traced(jobs: Iterable[JobConfig], *, processes: int) -> None:
    arguments = ["--configs", *(f"{job.run.run_uri}/run.json" for job in jobs)]
    run_ranks("tests.support.drivers.train_traced", arguments, processes=processes)


def of_the_loss(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if name.startswith("model.")}


def reference_of(changes: Mapping[str, Any]) -> str:
    return "-".join(sorted(f"{name}{len(str(value))}" for name, value in of_the_loss(changes).items()))


def steps_of(job: JobConfig) -> list[list[dict[str, Any]]]:
    """Of each rank, its steps."""
    return [json.loads(path.read_text()) for path in sorted(Path(job.run.run_uri, "collectives").glob("*.json"))]


@pytest.mark.parametrize("name", WAYS)
def test_ranks_ask_for_the_same_collectives(name: str, runs: Mapping[str, JobConfig]) -> None:
    first, second = steps_of(runs[name])
    assert len(first) == len(second) == -(-SAMPLES // 4)
    on_one, on_none = situations(first, second)
    assert on_one >= 3 and on_none >= 1, "the data must have steps with pictures on one rank only, and on none"
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        assert one["collectives"] == other["collectives"], f"step {step}"
    assert any(step["collectives"] for step in first)


@pytest.mark.parametrize("name", WAYS)
def test_losses_are_those_of_one_process(name: str, runs: Mapping[str, JobConfig]) -> None:
    expected = losses(runs[f"plain {reference_of(WAYS[name])}"])
    assert len(set(expected)) == len(expected) == -(-SAMPLES // 4)
    bound = RELATIVE_BF16 if "bf16" in name else RELATIVE
    assert losses(runs[name]) == pytest.approx(expected, rel=bound)


def situations(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> tuple[int, int]:
    """Micro-steps with pictures on one rank only, and on none."""
    images = [[has_any for step in steps for has_any in step["images"]] for steps in (first, second)]
    pairs = list(zip(*images, strict=True))
    return sum(one != other for one, other in pairs), sum(not one and not other for one, other in pairs)
