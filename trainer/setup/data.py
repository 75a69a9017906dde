"""The prepared data of a run, and the order in which it is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.train import warmup_problem
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index, SplitIndex
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.sizing.flops import SequenceFlops, flops_per_sequence
from vlmpipe.trainer.sizing.model_shape import ModelShape


@dataclass(frozen=True)
class TrainingData:
    """The prepared data of a run, and the order in which it is trained on."""

    pointers: DataPointers
    cached: bool  # whether the vision encoder's output is read instead of computed
    chat: Chat
    index: Index
    train: SplitIndex
    sampler: PackedBatchSampler
    total_steps: int


def open_data(job: JobConfig) -> TrainingData:
    """Index, tokenizer and data order of the prepared data.

    Raises ConfigError for a warm-up of more steps than these data give.
    """
    pointers = job.pointers()
    index, form = Index.load(pointers.prepared_uri), image_form_of(job.model)
    train = index.split("train")
    sampler = PackedBatchSampler.of_training(train, job)
    total_steps = sampler.num_steps(job.train.epochs, max_steps=job.train.max_steps)
    if problem := warmup_problem(job.train, total_steps):
        raise ConfigError(f"train.{problem.partition(': ')[0]}", fix=problem.partition(": ")[2])
    sampler.require_batch()
    return TrainingData(
        pointers=pointers,
        cached=pointers.features != "off",
        chat=Chat.load(open_prepared(pointers.prepared_uri), form, is_proved=True),
        index=index,
        train=train,
        sampler=sampler,
        total_steps=total_steps,
    )


def mean_sequence_flops(
    job: JobConfig, shape: ModelShape, sequence: PackedBatchSampler, *, cached: bool
) -> SequenceFlops:
    """Mean contents of a sequence of the first epoch."""
    epoch = sequence.totals(0)
    label_tokens = epoch.label_tokens / epoch.sequences
    if epoch.images:  # where they differ, the mean one
        shape = shape.of_images(max(1, round(epoch.image_tokens / epoch.images)))
    return flops_per_sequence(
        shape,
        sequence_length=job.data.sequence_length,
        images=epoch.shown / epoch.sequences,
        label_tokens=label_tokens,
        cached=cached,
        activation_checkpointing=job.train.activation_checkpointing,
        loss_chunks=job.train.loss_chunks(job.train.micro_batch_size * label_tokens),
        feature_layer=job.model.feature_layer,
        sample_pairs=epoch.squared_tokens / epoch.sequences,
        recomputes_tower=job.train.tower_activation_checkpointing,
    )
