"""`vlmpipe cache explain`: what decides whether cached features are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer.runs import make_run
from vlmpipe.cli import app as cli
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.prepared_files import DONE
from vlmpipe.trainer.feature_cache.explain import explain
from vlmpipe.trainer.feature_cache.store import DESCRIPTION, features_key, write_description, write_shard
from vlmpipe.trainer.storage import open_storage


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    return make_run(tmp_path_factory.mktemp("explain"), "run")


def encode(job: JobConfig, scratch: Path, *, share: float = 1.0) -> None:
    """Keep features of the first of the job's images: their numbers do not matter here."""
    images = sorted(Index.load(job.pointers().prepared_uri).unique_images())
    store = open_storage(job.pointers().features_uri)
    write_description(store, job.model, job.train.precision)
    features = {image: torch.zeros(1, 1, dtype=torch.bfloat16) for image in images[: int(share * len(images))]}
    write_shard(store, scratch, features, tower_sha256="0")


def with_model(job: JobConfig, **changes: Any) -> JobConfig:
    return job.model_copy(update={"model": job.model.model_copy(update=changes)})


def test_nothing_then_a_part_then_all(job: JobConfig, tmp_path: Path) -> None:
    nothing = explain(job)
    assert (nothing.state, nothing.missing) == ("miss", nothing.images) and nothing.images > 1
    encode(job, tmp_path, share=0.5)
    part = explain(job)
    assert part.state == "part" and part.missing == nothing.images - nothing.images // 2
    assert f"The next run encodes {part.missing:,}." in part.lines()
    encode(job, tmp_path)
    assert (explain(job).state, explain(job).missing) == ("hit", 0)


def test_another_tower_setting_is_named_with_both_values(job: JobConfig, tmp_path: Path) -> None:
    encode(job, tmp_path)
    other = explain(with_model(job, feature_layer=job.model.feature_layer - 1))
    assert other.state == "miss"
    (store,) = other.others
    assert store.key == features_key(job.model, "fp32")
    layer = job.model.feature_layer
    assert store.differences == {"tower.layer": (layer - 1, layer)}
    assert f"  tower.layer: {layer - 1} here, {layer} there" in other.lines()


def test_the_key_changes_with_every_field_of_the_description(job: JobConfig) -> None:
    changes: list[dict[str, Any]] = [
        {"feature_layer": 0},
        {"feature_select": "drop_cls"},
        {"image_size": 128},
        {"seed": 9},
    ]
    keys = {features_key(with_model(job, **change).model, "fp32") for change in changes}
    keys |= {features_key(job.model, "fp32"), features_key(job.model, "bf16")}
    assert len(keys) == len(changes) + 2


def test_a_store_of_an_earlier_version_is_named_without_reasons(job: JobConfig, tmp_path: Path) -> None:
    open_storage(job.run.features_root).write("0" * 32 + "/shard-1.json", b"{}")
    old = next(store for store in explain(job).others if store.key == "0" * 32)
    assert not old.described and old.differences == {}


def test_unprepared_data_is_reported(job: JobConfig) -> None:
    prepared = open_storage(job.pointers().prepared_uri)
    done = prepared.read(DONE)
    prepared.delete(DONE)
    try:
        assert explain(job).state == "data not prepared"
    finally:
        prepared.write(DONE, done)


def test_command_prints_text_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["cache", "explain", "configs/digits.yaml", f"output.root_uri={tmp_path}"]
    for extra in ([], ["--json"]):
        cli.app([*arguments, *extra], standalone_mode=False)
    said = capsys.readouterr().out
    text, found = said[: said.index("{\n")], json.loads(said[said.index("{\n") :])
    assert "is not prepared yet" in text and "tower.layer = " in text
    assert found["state"] == "data not prepared" and found["description"]["dtype"] == "bfloat16"
    assert not list(tmp_path.rglob(DESCRIPTION)), "explaining writes nothing"
