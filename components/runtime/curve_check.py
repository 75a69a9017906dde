"""Checks of prepared data for a learning curve, before a training starts."""

from __future__ import annotations

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.records.sweep import Sweep
from vlmpipe.trainer.storage import open_storage

MIN_VALIDATION = 10  # validation samples


def require_curve(sweep: Sweep) -> None:
    """Raise DataError for too few validation samples, ConfigError where the smallest share fills no batch."""
    from vlmpipe.trainer.data.prefixes.sharing import resolved_sharing
    from vlmpipe.trainer.data.sampler import PackedBatchSampler  # not above: compiling needs no numpy
    from vlmpipe.trainer.data.shards.index import Index

    smallest = min(sweep.shares, key=lambda name: sweep.shares[name])
    for training in sweep.trainings:
        pointers = DataPointers.read_if_there(open_storage(training.data_from))
        if training.variant != smallest or pointers is None:
            continue
        job = JobConfig.load(f"{training.run_uri}/run.json")
        index = Index.load(pointers.prepared_uri)
        validation = min(len(index.split("eval")), job.evaluate.max_samples or len(index.split("eval")))
        if validation < MIN_VALIDATION:
            raise DataError(
                f"a learning curve is to be drawn by {validation} validation samples",
                expected=f"at least {MIN_VALIDATION}",
                fix="raise data.validation_fraction or evaluate.max_samples, or add samples",
            )
        job, _ = resolved_sharing(job, str)  # sharing, the smallest share fills the fewest sequences
        PackedBatchSampler.of_training(index.split("train"), job).require_batch()
