"""A model section that makes no model is one sentence, the same in check, plan and run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.gcs.server import FakeGcs
from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_shipped
from vlmpipe import api
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage

BROKEN = {
    "a patch of nothing": "model.tower.config.patch_size=0",
    "a size that is a text": "model.tower.config.hidden_size=abc",
    "a type that nobody knows": "model.language_model.config.model_type=nope",
    "layers below none": "model.language_model.config.num_hidden_layers=-1",
    "heads that do not divide": "model.tower.config.num_attention_heads=7",
    "a folder that is not there": "model.language_model={weights: /no/such/folder}",
    "a bucket without a model": "model.language_model={weights: 'gs://bucket/weights'}",
    "no possible hub id": "model.language_model={weights: 'a/b/c d'}",
    "adapters for layers that are not there": "model.lora={targets: [no_such_layer]}",
    "packed samples of a mixer that is not known": (
        "model.language_model.config={model_type: granitemoehybrid, layer_types: [mamba, attention], hidden_size: 32, "
        "num_hidden_layers: 2, num_attention_heads: 4, mamba_n_heads: 4, mamba_d_head: 16, num_local_experts: 0}"
    ),
}


@pytest.fixture(autouse=True)
def bucket(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    with FakeGcs(buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        yield open_storage("gs://bucket/llava")


@pytest.mark.parametrize("override", BROKEN.values(), ids=BROKEN.keys())
def test_every_command_refuses_an_impossible_model_before_anything_starts(override: str, tmp_path: Path) -> None:
    config = api.load(ROOT / "configs/digits.yaml", override, f"output.root_uri={tmp_path}")
    failed = [finding for finding in api.check(config) if finding.state == "failed"]
    assert failed and all(finding.code == 64 for finding in failed)
    with pytest.raises(ConfigError) as planned:
        api.plan(config)
    with pytest.raises(ConfigError) as started:
        api.run(config)
    with pytest.raises(ConfigError) as submitted:
        api.submit(load_shipped(ROOT / "configs/digits.yaml", [override]), dry_run=True)
    assert started.value.text() == planned.value.text() == submitted.value.text()
    assert not list(tmp_path.iterdir())


def test_ranks_that_cannot_share_sequences_are_refused_with_the_degrees_that_can() -> None:
    ranks = ("cluster.processes_per_replica=3", "data.sequence_length=384", "train.global_batch_size=16")
    config = api.load(ROOT / "configs/digits.yaml", "train.context_parallel=3", *ranks)
    failed = [finding for finding in api.check(config) if finding.state == "failed"]
    assert [(one.subject, one.code) for one in failed] == [("parameters", 64)]
    assert "train.context_parallel 3 does not divide the language model's 4 attention heads" in failed[0].text
    assert "one of 1, 2, 4" in failed[0].text


def test_an_unknown_region_is_a_warning() -> None:
    def vertex(location: str) -> str:
        values = ("gcp.project=my-project", f"gcp.location={location}", "gcp.pipeline_root=gs://bucket/root")
        config = load_shipped(ROOT / "configs/digits.yaml", values)
        return " ".join(finding.text for finding in api.check(config) if finding.subject == "vertex")

    assert "us-central9 is no region that has GPUs: did you mean us-central1?" in vertex("us-central9")
    assert "did you mean" not in vertex("us-central1")


def test_epochs_are_bounded() -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs"):
        api.load(ROOT / "configs/digits.yaml", f"train.epochs={10**20}")


def test_a_valid_models_parameters_are_counted() -> None:
    found = next(one for one in api.check(api.load(ROOT / "configs/digits.yaml")) if one.subject == "parameters")
    assert found.state == "ok" and "are trained" in found.text


def test_a_whole_llava_in_a_bucket_is_planned_from_its_configuration(bucket: Storage) -> None:
    """As the same parts from the run file are; `check` refuses settings that contradict it with the value to set."""
    plain = api.load(ROOT / "configs/digits.yaml")
    tower, text = plain.model.tower.config, plain.model.language_model.config
    whole = {"model_type": "llava", "vision_config": {**tower, "image_size": plain.model.image_size}}
    whole |= {"text_config": {**text, "vocab_size": 280}, "vision_feature_layer": 0}
    bucket.write("config.json", json.dumps(whole | {"vision_feature_select_strategy": "full"}).encode())
    parts = ("tower", "projector", "language_model")
    drawn = [f"model.{name}={{weights: 'gs://bucket/llava'}}" for name in parts]
    config = api.load(ROOT / "configs/digits.yaml", *drawn)
    assert api.plan(config).model.shape == api.plan(plain).model.shape
    for changed, fix in (("image_size=128", "image_size to 64"), ("feature_layer=-1", "feature_layer to 0")):
        other = api.load(ROOT / "configs/digits.yaml", *drawn, f"model.{changed}")
        failed = "; ".join(one.text for one in api.check(other) if one.state == "failed")
        assert f"model.{changed.replace('=', ' is ')}" in failed and f"set model.{fix}" in failed
