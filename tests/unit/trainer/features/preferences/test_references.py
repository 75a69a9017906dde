"""References are addressed by what they depend on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.trainer.runs import make_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.features.preferences.references import POINTER, uri_of
from vlmpipe.trainer.features.preferences.scores import preference_scores
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import write_record

KEY = {"model": "m", "precision": "fp32"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"first weights")
    return folder


@pytest.fixture
def job(tmp_path: Path, folder: Path) -> JobConfig:
    job = make_run(tmp_path / "root", "pairs", {"data.max_samples": 40}, features="off")
    model = job.model.model_copy(update={"language_model": WeightsConfig(weights=str(folder))})
    return job.model_copy(update={"model": model})


def test_other_weights_in_the_same_folder_have_other_references(job: JobConfig, folder: Path) -> None:
    before = uri_of(job, KEY)
    assert uri_of(job, KEY) == before != uri_of(job, {**KEY, "precision": "bf16"})
    (folder / "model.safetensors").write_bytes(b"other weights, trained longer")
    assert uri_of(job, KEY) != before


def test_a_run_does_not_go_on_against_other_references(job: JobConfig, folder: Path) -> None:
    write_record(open_storage(job.run.run_uri), POINTER, {"uri": uri_of(job, KEY)})
    assert uri_of(job, KEY)
    (folder / "model.safetensors").write_bytes(b"other weights, trained longer")
    with pytest.raises(ConfigError, match="the starting model or the data have changed since this run began"):
        uri_of(job, KEY)
    anew = job.model_copy(update={"train": job.train.model_copy(update={"resume": "never"})})
    assert uri_of(anew, KEY)


def test_without_references_only_the_model_itself_is_scored() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -2.5], [-0.1, -9.0]])
    alone = preference_scores(log_probs, None, beta=0.1)
    assert alone == {"preference_accuracy": pytest.approx(2 / 3)}
    assert alone.items() <= preference_scores(log_probs, torch.zeros(3, 2), beta=0.1).items()
