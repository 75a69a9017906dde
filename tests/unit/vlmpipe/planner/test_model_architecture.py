"""A model section that makes no model is one sentence, the same in check, plan and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import ROOT
from trainer.errors import ConfigError
from vlmpipe import api

BROKEN = {
    "a patch of nothing": "model.tower.config.patch_size=0",
    "a size that is a text": "model.tower.config.hidden_size=abc",
    "a type that nobody knows": "model.language_model.config.model_type=nope",
    "layers below none": "model.language_model.config.num_hidden_layers=-1",
    "heads that do not divide": "model.tower.config.num_attention_heads=7",
    "a folder that is not there": "model.language_model={weights: /no/such/folder}",
    "a bucket": "model.language_model={weights: 'gs://bucket/weights'}",
    "no possible hub id": "model.language_model={weights: 'a/b/c d'}",
    "adapters for layers that are not there": "model.lora={targets: [no_such_layer]}",
}


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
        api.submit(config, dry_run=True)
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
        config = api.load(ROOT / "configs/llava-7b-lora.yaml", *values)
        return " ".join(finding.text for finding in api.check(config) if finding.subject == "vertex")

    assert "us-centrall1 is no region that has GPUs: did you mean us-central1?" in vertex("us-centrall1")
    assert "did you mean" not in vertex("us-central1")


def test_epochs_are_bounded() -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs"):
        api.load(ROOT / "configs/digits.yaml", f"train.epochs={10**20}")


def test_a_valid_models_parameters_are_counted() -> None:
    found = next(one for one in api.check(api.load(ROOT / "configs/digits.yaml")) if one.subject == "parameters")
    assert found.state == "ok" and "are trained" in found.text
