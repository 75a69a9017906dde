"""Losses of single answers under two checkpoints of a run, and the audit of a run in a bucket that reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.fakes.gcs.server import FakeGcs
from tests.support.trainer.runs import make_run, metrics, run_ranks, train_runs
from vlmpipe.audit.files import audit_counts, write_page
from vlmpipe.cli.app import app
from vlmpipe.trainer.audit.audit import AuditRequest, audit
from vlmpipe.trainer.audit.checkpoints import alone, checkpoints_of, early_and_late, opened_model
from vlmpipe.trainer.audit.findings import Audit
from vlmpipe.trainer.audit.losses import answer_losses
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.exclusions.exclusion_file import read_exclusions
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.records.step import require_step
from vlmpipe.trainer.storage import open_storage

STEPS = 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    changes = {
        "train.max_steps": STEPS, "train.checkpoint_every_steps": 2, "train.keep_checkpoints": 5,
        "train.validate_every_steps": 2, "train.validation_sequences": 1000, "features.cache": "off",
    }  # fmt: skip
    job = make_run(tmp_path_factory.mktemp("trained"), "audited", changes, features="off")
    train_runs([job], processes=1)
    return job


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with FakeGcs(buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
        yield server


def test_losses_of_answers_sum_to_the_validation_losses_of_their_steps(trained: JobConfig) -> None:
    expected = {line["step"]: line["validation_loss"] for line in metrics(trained) if "validation_loss" in line}
    stored, faults = checkpoints_of(trained)
    assert not faults
    compared = early_and_late(stored)
    assert [one.step for one in compared] == [2, STEPS]
    split = Index.load(trained.pointers().prepared_uri).split("eval")
    for checkpoint in compared:
        with opened_model(trained, checkpoint, alone()) as model:
            seen = answer_losses(trained, split, model, range(len(split)))
            blank = answer_losses(trained, split, model, range(len(split)), is_blank=True)
        assert int(seen.tokens.sum()) == int(split.label_tokens.sum())
        assert float(seen.nats.sum() / seen.tokens.sum()) == pytest.approx(expected[checkpoint.step], rel=1e-4)
        assert (seen.missed <= seen.tokens).all()
        assert not np.allclose(seen.nats, blank.nats)
    assert torch.is_grad_enabled()


@pytest.mark.usefixtures("bucket")
def test_a_job_of_two_ranks_in_a_bucket_finds_what_one_process_finds_and_once(trained: JobConfig) -> None:
    found, catalogue = audit(AuditRequest(trained, trained.pointers().prepared_uri, has_run=True))
    assert found.checkpoint_steps == (2, STEPS)
    assert found.finding("suspected_label").checked == len(catalogue.turns)
    job = _uploaded(trained)
    store, folder = open_storage(job.run.run_uri), open_storage(f"{job.run.run_uri}/audit")
    _run_job(job)
    written = Audit.require(folder)
    assert [(one.kind, one.samples, one.checked) for one in written.findings] == [
        (one.kind, one.samples, one.checked) for one in found.findings
    ]
    assert len(read_exclusions(folder.uri("exclusions.jsonl")).ids) == found.excluded
    assert require_step(store, "audit").state == "done"
    _run_job(job)
    assert require_step(store, "audit").state == "reused"
    audited, page = write_page(job.run.run_uri)
    assert audit_counts(audited)["samples"] == found.samples
    assert b"<h1>audited</h1>" in page and folder.read("audit.html") == page
    command = ["data", "audit", job.run.run_uri, "--output", "gs://bucket/audits/1", "--max-samples", "8", "--json"]
    said = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert said["files"]["exclusions"] == "gs://bucket/audits/1/exclusions.jsonl" and said["checkpoint_steps"]
    assert "losses of 8 of" in next(one["obstacle"] for one in said["findings"] if one["kind"] == "suspected_label")


def _uploaded(job: JobConfig) -> JobConfig:
    """The same run, with its prepared data, in the bucket."""
    root, store = Path(job.run.root_uri), open_storage("gs://bucket")
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.parts[len(root.parts)] in ("runs", "prepared"):
            store.upload(path, str(path.relative_to(root)))
    run = open_storage(f"gs://bucket/runs/{job.run.run_id}")
    content = job.model_dump(mode="json")
    content["run"]["root_uri"] = "gs://bucket"
    run.write("run.json", json.dumps(content).encode())
    pointers = job.pointers()
    prepared = pointers.prepared_uri.replace(str(root), "gs://bucket").replace("file://", "")
    run.write("prepared.json", pointers.model_copy(update={"prepared_uri": prepared}).model_dump_json().encode())
    return JobConfig.load(run.uri("run.json"))


def _run_job(job: JobConfig) -> None:
    run_ranks("vlmpipe.trainer.audit.job", ["--config", f"{job.run.run_uri}/run.json"], processes=2)
