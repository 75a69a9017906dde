"""What data.share_prefix auto becomes, and what is prepared for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.data.prepared import run_prepare
from tests.support.pipelines.run_files import small
from tests.support.trainer.tiny_runs import TINY
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.config.sources.data_fields import AUTO_QUESTIONS
from vlmpipe.trainer.data.prefixes.sharing import resolved_sharing, stores_prefixes
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index

# Of the first epochs of TINY, by the code before the setting. Its prepared files and losses were equal to the bit, too.
BEFORE = (
    "6cc3d801392478f10008657ee7c28763c6e0057a88a2eef3b6d8ae704e519dc4",
    "c3be9b469c18ac2ba3a0b86835014c1aefc582c8bd41bc4726327a5a1157e2fd",
    "424a97d0ec446b480d2b3c86a4c461930caddaa8ecb79e80208a85faefc30f18",
)


def job_of(**changes: Any) -> JobConfig:
    config = small(**changes)
    return JobConfig.model_validate(config.to_run_json(RunPaths(run_id="run", root_uri="/runs")))


@pytest.mark.parametrize(("given", "expected"), [(0, AUTO_QUESTIONS), (7, 7)])
def test_auto_shares_up_to_a_bound_where_settings_and_model_allow_it(given: int, expected: int) -> None:
    job = job_of(data__share_prefix="auto", data__max_questions_per_image=given)
    shared, why_not = resolved_sharing(job, str)
    assert (shared.data.share_prefix, shared.data.max_questions_per_image, why_not) == ("on", expected, "")
    assert stores_prefixes(job)


def test_auto_is_off_with_the_reason_of_the_model_or_of_the_settings() -> None:
    job = job_of(data__share_prefix="auto")
    separate, why_not = resolved_sharing(job, lambda: "layers with windows")
    assert (separate.data.share_prefix, why_not) == ("off", "layers with windows")
    assert stores_prefixes(job)  # what a model can is not known where data is prepared
    job = job_of(data__share_prefix="auto", data__pack=False)
    separate, why_not = resolved_sharing(job, str)
    assert (separate.data.share_prefix, why_not) == ("off", "data.pack false, which gives each sample its own sequence")
    assert not stores_prefixes(job)


@pytest.mark.parametrize("given", ["on", "off"])
def test_what_is_set_stays(given: str) -> None:
    job = job_of(data__share_prefix=given)
    assert resolved_sharing(job, lambda: "layers with windows") == (job, "")
    assert stores_prefixes(job) == (given == "on")


def test_plans_without_shared_prefixes_are_those_of_the_code_before_them(tmp_path: Path) -> None:
    """Digits of scikit-learn: a change of its scans, of the tokenizer's training or of packing is another digest."""
    job = JobConfig.model_validate({**TINY, "run": {"run_id": "run", "root_uri": str(tmp_path)}})
    split = Index.load(run_prepare(job).uri).split("train")
    assert not split.has_prefixes
    sampler = PackedBatchSampler.of_training(split, job)
    assert tuple(sampler.plan(epoch).digest() for epoch in range(len(BEFORE))) == BEFORE
