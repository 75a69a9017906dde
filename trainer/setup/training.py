"""The setup of training, as a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.loader import Float32Array, PackedLoader
from vlmpipe.trainer.data.prefixes.separate_cost import cost_text, separate_cost
from vlmpipe.trainer.data.prefixes.sharing import resolved_sharing
from vlmpipe.trainer.dataloading.batches import ImageSource
from vlmpipe.trainer.dataloading.readers import Readers
from vlmpipe.trainer.distributed.agreement import meet
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank, replica_of, require_divisible
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.evaluation.answer_misses import AnswerMisses
from vlmpipe.trainer.evaluation.validation_loss import EXACT_MATCH, Validation, validation_of
from vlmpipe.trainer.features.before_training import BeforeTraining, FindsReferences
from vlmpipe.trainer.hooks.table import features_of
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.monitoring.run_facts import RunFacts
from vlmpipe.trainer.monitoring.source_losses import SourceLosses
from vlmpipe.trainer.records.commit import CommitRecord
from vlmpipe.trainer.setup.data import TrainingData, open_data
from vlmpipe.trainer.setup.loader import build_loader, image_source_of, validation_ranges
from vlmpipe.trainer.setup.model import BuiltModel, build_model, with_weights_from_data
from vlmpipe.trainer.setup.record import record_of
from vlmpipe.trainer.setup.shared_prefix import sharing_obstacle
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
    requested = job
    job, why_not = resolved_sharing(job, lambda: sharing_obstacle(requested.model))
    replica, family = _placed(job, worker), family_of(job.model)
    data = open_data(job)
    if why_not and worker.is_first:
        cost = cost_text(separate_cost(data.train, in_pairs=job.train.in_pairs), in_pairs=job.train.in_pairs)
        print(f"train: data.share_prefix auto computes images for each sample: found {why_not}; {cost}", flush=True)
    built = build_model(job, family, data, replica, worker)
    meet(worker)  # reading weights, a node may be much faster than another
    readers, loader = build_loader(job, data, built, replica, worker)
    built = with_weights_from_data(job, built, data, loader)
    images = image_source_of(job, readers.features, built.tower_sha256, replica)
    losses = SourceLosses.of(job, worker.device)
    misses = AnswerMisses(worker.device) if job.train.best_metric == EXACT_MATCH else None
    ready = build_strategy(job, family, data, built, worker, LossNotes(losses, misses))
    record = record_of(requested, ready.strategy, data, built, worker)
    loader.references = _references(
        BeforeTraining(job, ready.strategy, record, data.chat, data.index, readers.samples, images, replica, worker)
    )
    return TrainingSetup(
        strategy=ready.strategy,
        replica=replica,
        loader=loader,
        image_source=images,
        record=record,
        facts=_facts(ready, record, data, built),
        validation=build_validation(job, data, readers, images, replica, misses),
        source_losses=losses,
    )


def _placed(job: JobConfig, worker: ProcessContext) -> DataParallelRank:
    """The place of this rank, once this machine has what the run file's features need."""
    for feature in features_of(job):
        feature.require(worker.device)
    replica = replica_of(job.train, worker)
    require_divisible(job, replica)
    if worker.is_first:
        for name, origin in job.model.origins().items():
            print(f"train: model.{name}: {origin}", flush=True)
    return replica


def _references(run: BeforeTraining) -> Float32Array | None:
    """Log probabilities that pairs are compared with; None where samples are no pairs."""
    finding = (feature.references(run) for feature in features_of(run.job) if isinstance(feature, FindsReferences))
    return next(finding, None)


def _facts(ready: ReadyStrategy, record: CommitRecord, data: TrainingData, built: BuiltModel) -> RunFacts:
    return RunFacts(
        strategy=ready.strategy,
        record=record,
        total_steps=data.total_steps,
        num_parameters=built.num_parameters,
        num_trainable=built.num_trainable,
        features="cached" if data.cached else "online",
        shape=ready.shape,
        compiling=ready.compiling,
        forward_timer=ready.forward_timer,
    )


def build_validation(
    job: JobConfig,
    data: TrainingData,
    readers: Readers,
    image_source: ImageSource,
    replica: DataParallelRank,
    misses: AnswerMisses | None = None,
) -> Validation | None:
    """The validation loss of the evaluation split; None where the run does not validate."""
    images = replica.takes_images and not data.cached
    split = data.index.split("eval")
    ranges = validation_ranges(job, data, readers, images=images)
    samples = readers.samples
    return validation_of(
        job, split, data.chat, samples, image_source, replica, images=images, misses=misses, ranges=ranges
    )
