"""The record of a checkpoint at step 0, which identifies the run."""

from __future__ import annotations

import hashlib
import json

from vlmpipe.trainer.checkpoint.resume import versions
from vlmpipe.trainer.checkpoint.resume_rules import settings_of
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.setup.model import BuiltModel
from vlmpipe.trainer.setup.open_run import OpenRun
from vlmpipe.trainer.strategies.base import Strategy
from vlmpipe.trainer.weights_digest import model_sha256


def record_of(run: OpenRun, built: BuiltModel, strategy: Strategy) -> CommitRecord:
    job, data, worker = run.requested, run.data, run.worker
    return CommitRecord(
        attempt=0,
        epoch=0,
        step=0,
        sequences_consumed=0,
        world_size=worker.world_size,
        num_nodes=worker.num_nodes,
        strategy=job.train.strategy,
        checkpoint_format=strategy.checkpoint_format,
        plan_sha256=_plan_sha256(data.pointers, data.sampler),
        model_sha256=model_sha256(job),
        tower_sha256=built.tower_sha256,
        frozen_sha256=built.frozen_sha256,
        versions=versions(),
        settings=settings_of(job),
        degrees=(job.train.tensor_parallel, job.train.pipeline_parallel, job.train.context_parallel),
        total_steps=data.total_steps,
    )


def _plan_sha256(pointers: DataPointers, sequence: PackedBatchSampler) -> str:
    """Digest of everything that decides which rows a step reads. Prepared data is addressed by content."""
    decides = [pointers.prepared_uri.rpartition("/")[2], sequence.global_batch_size, sequence.plan(0).digest()]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()
