"""The setup of training, as a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.loader import Float32Array, PackedLoader
from vlmpipe.trainer.dataloading.batches import ImageSource
from vlmpipe.trainer.dataloading.readers import Readers
from vlmpipe.trainer.distributed.agreement import meet
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.evaluation.validation_loss import Validation, validation_of
from vlmpipe.trainer.features.before_training import BeforeTraining, FindsReferences
from vlmpipe.trainer.hooks.features import features_of
from vlmpipe.trainer.monitoring.run_facts import RunFacts
from vlmpipe.trainer.monitoring.source_losses import SourceLosses
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.setup.loader import build_loader, image_source_of, validation_ranges
from vlmpipe.trainer.setup.model import BuiltModel, build_model, with_weights_from_data
from vlmpipe.trainer.setup.open_run import OpenRun, open_run
from vlmpipe.trainer.setup.record import record_of
from vlmpipe.trainer.setup.strategy import LossNotes, ReadyStrategy, build_strategy
from vlmpipe.trainer.strategies.base import Strategy


@dataclass(frozen=True)
class TrainingSetup:
    """Model, data, strategy and state that one rank trains with."""

    strategy: Strategy
    replica: DataParallelRank
    loader: PackedLoader
    image_source: ImageSource
    record: CommitRecord  # of a checkpoint at step 0; the loop fills in where it is
    facts: RunFacts
    validation: Validation | None  # where the run validates
    source_losses: SourceLosses | None  # where the run has several sources


def build_training(job: JobConfig, worker: ProcessContext) -> TrainingSetup:
    """Model, data and strategy of this rank. Raises ConfigError before anything large is built where it can."""
    run = open_run(job, worker)
    built = build_model(run)
    meet(worker)  # reading weights, a node may be much faster than another
    readers, loader = build_loader(run, built)
    built = with_weights_from_data(run, built, loader)
    images = image_source_of(run, readers.features, built.tower_sha256)
    notes = LossNotes.of(run)
    ready = build_strategy(run, built, notes)
    record = record_of(run, built, ready.strategy)
    loader.references = _references(run, ready.strategy, record, readers, images)
    validation = _validation(run, readers, images, notes)
    facts = _facts(run, built, ready, record)
    return TrainingSetup(ready.strategy, run.replica, loader, images, record, facts, validation, notes.sources)


def _references(
    run: OpenRun, strategy: Strategy, record: CommitRecord, readers: Readers, images: ImageSource
) -> Float32Array | None:
    """Log probabilities that pairs are compared with; None where samples are no pairs."""
    data = run.data
    start = BeforeTraining(
        run.job, strategy, record, data.chat, data.index, readers.samples, images, run.replica, run.worker
    )
    finding = (feature.references(start) for feature in features_of(run.job) if isinstance(feature, FindsReferences))
    return next(finding, None)


def _validation(run: OpenRun, readers: Readers, images: ImageSource, notes: LossNotes) -> Validation | None:
    """The validation loss of the evaluation split; None where the run does not validate."""
    return validation_of(
        run.job,
        run.data.index.split("eval"),
        run.data.chat,
        readers.samples,
        images,
        run.replica,
        images=run.reads_images,
        misses=notes.misses,
        ranges=validation_ranges(run, readers),
    )


def _facts(run: OpenRun, built: BuiltModel, ready: ReadyStrategy, record: CommitRecord) -> RunFacts:
    return RunFacts(
        strategy=ready.strategy,
        record=record,
        total_steps=run.data.total_steps,
        num_parameters=built.num_parameters,
        num_trainable=built.num_trainable,
        features="cached" if run.data.cached else "online",
        shape=ready.shape,
        compiling=ready.compiling,
        forward_timer=ready.forward_timer,
    )
