"""Losses of single answers under two checkpoints of a run, read as the audit reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.trainer.runs import make_run, metrics, run_ranks, train_runs
from vlmpipe.audit.files import audit_counts, write_page
from vlmpipe.trainer.audit.audit import AuditRequest, audit
from vlmpipe.trainer.audit.checkpoints import alone, checkpoints_of, early_and_late, opened_model
from vlmpipe.trainer.audit.findings import Audit
from vlmpipe.trainer.audit.losses import answer_losses
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.records.step import require_step
from vlmpipe.trainer.storage import open_storage

STEPS = 6


def test_losses_of_answers_sum_to_the_validation_losses_of_their_steps(tmp_path: Path) -> None:
    changes = {
        "train.max_steps": STEPS, "train.checkpoint_every_steps": 2, "train.keep_checkpoints": 5,
        "train.validate_every_steps": 2, "train.validation_sequences": 1000, "features.cache": "off",
    }  # fmt: skip
    job = make_run(tmp_path, "audited", changes, features="off")
    train_runs([job], processes=1)
    expected = {line["step"]: line["validation_loss"] for line in metrics(job) if "validation_loss" in line}
    stored, faults = checkpoints_of(job)
    assert not faults
    compared = early_and_late(stored)
    assert [one.step for one in compared] == [2, STEPS]
    split = Index.load(job.pointers().prepared_uri).split("eval")
    for checkpoint in compared:
        with opened_model(job, checkpoint, alone()) as model:
            seen = answer_losses(job, split, model, range(len(split)))
            blank = answer_losses(job, split, model, range(len(split)), is_blank=True)
        assert int(seen.tokens.sum()) == int(split.label_tokens.sum())
        assert float(seen.nats.sum() / seen.tokens.sum()) == pytest.approx(expected[checkpoint.step], rel=1e-4)
        assert (seen.missed <= seen.tokens).all()
        assert not np.allclose(seen.nats, blank.nats)
    found, catalogue = audit(AuditRequest(job, job.pointers().prepared_uri, has_run=True))
    assert found.checkpoint_steps == (2, STEPS)
    assert found.finding("suspected_label").checked == len(catalogue.turns)
    assert torch.is_grad_enabled()
    _the_job_of_two_ranks_finds_the_same_and_once(job, found)


def _the_job_of_two_ranks_finds_the_same_and_once(job: JobConfig, found: Audit) -> None:
    folder = open_storage(f"{job.run.run_uri}/audit")
    run_job(job)
    written = Audit.require(folder)
    assert written.made_of == found.made_of
    assert [(one.kind, one.samples, one.checked) for one in written.findings] == [
        (one.kind, one.samples, one.checked) for one in found.findings
    ]
    assert require_step(open_storage(job.run.run_uri), "audit").state == "done"
    run_job(job)
    assert require_step(open_storage(job.run.run_uri), "audit").state == "reused"
    folder.delete("exclusions.jsonl")
    run_job(job)
    assert folder.stat("exclusions.jsonl")
    audited, page = write_page(job.run.run_uri)
    assert audit_counts(audited)["samples"] == found.samples and b"<h1>audited</h1>" in page


def run_job(job: JobConfig) -> None:
    run_ranks("vlmpipe.trainer.audit.job", ["--config", f"{job.run.run_uri}/run.json"], processes=2)
