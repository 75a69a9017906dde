"""Sets up training from the run file: data, model, loader, strategy, validation."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

import numpy as np
from torch import nn

from vlmpipe.trainer.checkpoint.commit import CommitRecord
from vlmpipe.trainer.checkpoint.random_states import seed_random_states
from vlmpipe.trainer.checkpoint.resume import versions
from vlmpipe.trainer.checkpoint.resume_rules import settings_of
from vlmpipe.trainer.config.compiling import CompileChoice, compile_choice
from vlmpipe.trainer.config.job import JobConfig, defers_weights
from vlmpipe.trainer.data.chat.added_tokens import require_trained_tokens, trained_tokens
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index, SplitIndex
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.dataloading.batches import ImageSource, cached_images, no_images, online_images
from vlmpipe.trainer.dataloading.readers import Readers, open_readers, warnings
from vlmpipe.trainer.distributed.agreement import meet, on_first
from vlmpipe.trainer.distributed.data_parallel_rank import DataParallelRank, replica_of, require_divisible
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import print_warning
from vlmpipe.trainer.evaluation.reference_log_probs import ReferenceLogProbs
from vlmpipe.trainer.evaluation.validation_loss import Validation, validation_of
from vlmpipe.trainer.feature_cache.reader import FeatureReader
from vlmpipe.trainer.hooks.table import features_of
from vlmpipe.trainer.models.arr_coc.question_centre import centre_questions, lacks_centre
from vlmpipe.trainer.models.base import Family, Weights
from vlmpipe.trainer.models.image_processor import image_preparer
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.layers.bf16 import use_tf32
from vlmpipe.trainer.models.layers.compile import compile_layers, has_compiler
from vlmpipe.trainer.models.layers.deferred_weights import DeferredWeights
from vlmpipe.trainer.models.layers.freeze import frozen_weights, require_frozen_tower, require_something_trained, trains
from vlmpipe.trainer.models.layers.lora import train_rows_only
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.models.loss.preference import pair_loss_of
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.monitoring.rank_metrics import ForwardTimer, waitless
from vlmpipe.trainer.monitoring.run_facts import RunFacts
from vlmpipe.trainer.monitoring.source_losses import SourceLosses
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.sizing.checkpoint_size import node_bytes
from vlmpipe.trainer.sizing.flops import SequenceFlops, flops_per_sequence
from vlmpipe.trainer.sizing.model_shape import ModelShape
from vlmpipe.trainer.sizing.pipeline_partition import stages_of
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import in_bucket
from vlmpipe.trainer.strategies.base import Strategy
from vlmpipe.trainer.strategies.frozen_weights import shared_sha256
from vlmpipe.trainer.strategies.registry import build_strategy as strategy_of
from vlmpipe.trainer.weights_digest import model_sha256, weights_sha256

CENTRE_SEQUENCES = 16  # packed sequences whose questions give their mean, on every rank the same


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


@dataclass(frozen=True)
class BuiltModel:
    """The model with its first weights, before it is sharded, and what identifies the weights that are not trained."""

    model: nn.Module
    deferred: Weights | None  # values of parameters that have none before they are sharded
    sequence_flops: SequenceFlops | None  # of a mean packed sequence, which pipeline stages are balanced by
    tower_sha256: str  # empty for a tower that is trained
    frozen_sha256: str  # empty where nothing is frozen
    num_parameters: int
    num_trainable: int


def build_training(job: JobConfig, worker: ProcessContext) -> TrainingSetup:
    """Model, data and strategy of this rank. Raises ConfigError before anything large is built where it can."""
    for feature in features_of(job):
        feature.require()
    replica = replica_of(job.train, worker)
    require_divisible(job, replica)
    if worker.is_first:
        for name, origin in job.model.origins().items():
            print(f"train: model.{name}: {origin}", flush=True)
    family = family_of(job.model)
    data = open_data(job)
    built = build_model(job, family, data, replica, worker)
    meet(worker)  # reading weights, a node may be much faster than another
    readers, loader = build_loader(job, data, built, replica, worker)
    if lacks_centre(built.model, built.deferred):
        rows = [loader.pack_sequence(row) for row in data.sampler.first_rows(CENTRE_SEQUENCES)]
        built = dataclasses.replace(built, deferred=centre_questions(built.model, built.deferred, rows))
    shape = family.shape(job.model)
    compiling = _compile_choice(job, shape, worker)
    source_names = [source.name for source in job.data.sources]
    source_losses = SourceLosses(source_names, worker.device) if source_names else None
    strategy, timer = build_strategy(job, family, data, built, worker, compiling, source_losses)
    image_source = _image_source(job, readers.features, built.tower_sha256, replica)
    record = _record(job, strategy, data, built, worker)
    if job.train.has_reference:
        references = ReferenceLogProbs(job, strategy, record, data.chat, readers.samples, image_source, replica)
        loader.references = references.find(data.index, worker)
    elif job.train.in_pairs:
        loader.references = np.zeros((len(data.train), 2), np.float32)  # known, and not looked at
    return TrainingSetup(
        strategy=strategy,
        replica=replica,
        loader=loader,
        image_source=image_source,
        record=record,
        facts=RunFacts(
            strategy=strategy,
            record=record,
            total_steps=data.total_steps,
            num_parameters=built.num_parameters,
            num_trainable=built.num_trainable,
            features="cached" if data.cached else "online",
            shape=shape,
            compiling=compiling,
            forward_timer=timer,
        ),
        validation=build_validation(job, data, readers, image_source, replica),
        source_losses=source_losses,
    )


def open_data(job: JobConfig) -> TrainingData:
    """Index, tokenizer and data order of the prepared data."""
    pointers = job.pointers()
    index, form = Index.load(pointers.prepared_uri), image_form_of(job.model)
    train = index.split("train")
    sampler = PackedBatchSampler.of_training(train, job, tile_tokens=form.tile_tokens)
    return TrainingData(
        pointers=pointers,
        cached=pointers.features != "off",
        chat=Chat.load(open_prepared(pointers.prepared_uri), form, is_proved=True),
        index=index,
        train=train,
        sampler=sampler,
        total_steps=sampler.num_steps(job.train.epochs, at_most=job.train.max_steps),
    )


def build_model(
    job: JobConfig, family: Family, data: TrainingData, replica: DataParallelRank, worker: ProcessContext
) -> BuiltModel:
    """The model on the CPU; where the strategy shards stored weights, without them (`BuiltModel.deferred`). Collective.

    Raises ConfigError, before building it, where it cannot be sharded or split into stages.
    """
    if job.train.tensor_parallel > 1:
        from vlmpipe.trainer.strategies.tensor_parallel.plan import (
            require_shardable,  # DTensor alone takes most of a second
        )

        shares = job.train.sequence_parallel
        require_shardable(job.model, job.train.tensor_parallel, cached=data.cached, sequence=shares)
    if job.train.context_parallel > 1:
        from vlmpipe.trainer.strategies.context_parallel import require_context_parallel

        require_context_parallel(job.model, job.train.context_parallel)
    sequence_flops = None
    if job.train.pipeline_parallel > 1:
        shape = family.shape(job.model)
        sequence_flops = mean_sequence_flops(job, shape, data.sampler, cached=data.cached)
        stages_of(shape.language.layers, job.train.stages, sequence_flops, image_layers=shape.image_layers)
    if job.model.family == "hf":
        from vlmpipe.trainer.models.hf.examine import examine, require_trainable

        require_trainable(job.model, pack=job.data.pack, cached=data.cached)
        if worker.is_first and job.data.pack and (why := examine(job.model).masked):
            print(f"train: attention computes scores between samples, under a mask: {why}", flush=True)
    if job.model.family == "llava" and job.data.pack:
        from vlmpipe.trainer.models.llava.packing import require_packable

        require_packable(job.model)
    deferred: Weights | None = None
    if defers_weights(job.model, job.train):
        model = family.blueprint(job.model, data.chat.tokenizer, buffers=True)
        deferred = family.initial_weights(job.model, data.chat.tokenizer)
    else:
        model = family.build(job.model, data.chat.tokenizer)
    require_trained_tokens(model, job.model, data.chat.tokenizer)
    if tokens := trained_tokens(job.model, data.chat.tokenizer):
        train_rows_only(model, tokens)
    tower = family.tower(model)
    if data.cached:
        require_frozen_tower(job.model, sum(weight.numel() for weight in tower.parameters() if weight.requires_grad))
    tower_sha256 = "" if trains(tower) else _tower_sha256(job, family, None if deferred else tower, worker)
    frozen = frozen_weights(model)
    num_trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    require_something_trained(job.model, num_trainable)
    read = deferred.read if deferred else frozen.__getitem__
    built = BuiltModel(
        model=model,
        deferred=deferred,
        sequence_flops=sequence_flops,
        tower_sha256=tower_sha256,
        frozen_sha256=shared_sha256({name: weight.numel() for name, weight in frozen.items()}, read, worker),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_trainable=num_trainable,
    )
    for feature in features_of(job):  # last: digests and sizes are those of the source
        feature.change_model(model)
    seed_random_states(job.train.seed, replica, step=0)
    return built


def _tower_sha256(job: JobConfig, family: Family, tower: nn.Module | None, worker: ProcessContext) -> str:
    """Digest of a frozen vision encoder, by rank 0 for all: the others neither read it, where it is None, nor hash it.
    Collective."""

    def digest() -> str:
        return weights_sha256(family.build_tower(job.model) if tower is None else tower)

    return on_first(worker, digest) if worker.world_size > 1 else digest()


def build_loader(
    job: JobConfig, data: TrainingData, built: BuiltModel, replica: DataParallelRank, worker: ProcessContext
) -> tuple[Readers, PackedLoader]:
    """Readers of samples and features, with shards fetched ahead, and the loader of this rank's packed sequences."""
    of_checkpoints = node_bytes(
        built.num_trainable,
        job.train,
        data_parallel=worker.world_size,
        nodes=worker.num_nodes,
        in_bucket=in_bucket(job.run.run_uri),
    )
    readers = open_readers(job, set_aside_bytes=of_checkpoints)  # they keep their room on this node
    ahead = readers.fetch_ahead(data.train, data.sampler, data.total_steps, job.data.shuffle_shards)
    if worker.is_first:
        doubts = [line for feature in features_of(job) for line in feature.warnings(job.train, data.total_steps)]
        for warning in (*warnings(ahead), *doubts):
            print_warning(warning)
    images = replica.takes_images and not data.cached
    loader = PackedLoader(data.train, data.sampler, data.chat, readers.samples, images=images, ahead=ahead)
    return readers, loader


def build_strategy(
    job: JobConfig,
    family: Family,
    data: TrainingData,
    built: BuiltModel,
    worker: ProcessContext,
    compiling: CompileChoice,
    source_losses: SourceLosses | None,
) -> tuple[Strategy, ForwardTimer | None]:
    """The training module under its strategy, and a timer of what no rank waits for another in."""
    module = family.training_module(job.model, built.model, cached=data.cached).train()
    Recompute.of(job.train).apply(family, module)
    use_tf32(job.train.precision, worker.device)
    units = dataclasses.replace(family.blocks(module), sequence_flops=built.sequence_flops)
    units.loss.pair_loss = pair_loss_of(job.train)
    units.loss.note_terms = source_losses.add if source_losses else None
    if built.deferred:
        fill = DeferredWeights(built.model, built.deferred, worker.device).fill
        units = dataclasses.replace(units, fill=fill)
    for feature in features_of(job):
        line = feature.change_layers(job.train, units, worker.device)
        if line and worker.is_first:
            print(f"train: {line}", flush=True)
    if compiling.on:
        compile_layers(units, job.train.compile_backend, must=job.train.compile == "on")
    if worker.is_first:
        print(f"train: compile {compiling.state}: {compiling.why}", flush=True)
    strategy = strategy_of(job.train, module, units, worker)
    timed = waitless(job.train, module, units, compiled=compiling.on)
    timer = ForwardTimer(timed, worker.device) if timed else None
    if worker.is_first and job.train.strategy.startswith("zero"):
        content = json.dumps(getattr(strategy, "settings", {}), indent=1, sort_keys=True)
        open_storage(job.run.run_uri).write("deepspeed.json", content.encode())
    return strategy, timer


def _compile_choice(job: JobConfig, shape: ModelShape, worker: ProcessContext) -> CompileChoice:
    return compile_choice(
        job.train,
        on_gpu=worker.device.type == "cuda",
        parameters=shape.total_parameters,
        sequence_length=job.data.sequence_length,
        quantizes_base=job.model.quantizes_base,
        has_compiler=has_compiler(),
    )


def build_validation(
    job: JobConfig, data: TrainingData, readers: Readers, image_source: ImageSource, replica: DataParallelRank
) -> Validation | None:
    """The validation loss of the evaluation split; None where the run does not validate."""
    images = replica.takes_images and not data.cached
    split = data.index.split("eval")
    return validation_of(job, split, data.chat, readers.samples, image_source, replica, images=images)


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
        images=epoch.tiles / epoch.sequences,
        label_tokens=label_tokens,
        cached=cached,
        activation_checkpointing=job.train.activation_checkpointing,
        loss_chunks=job.train.loss_chunks(job.train.micro_batch_size * label_tokens),
        feature_layer=job.model.feature_layer,
        sample_pairs=epoch.squared_tokens / epoch.sequences,
        recomputes_tower=job.train.tower_activation_checkpointing,
    )


def _image_source(
    job: JobConfig, features: FeatureReader | None, tower_sha256: str, replica: DataParallelRank
) -> ImageSource:
    if features is None:
        return online_images(image_preparer(job.model)) if replica.takes_images else no_images
    features.shards.require_tower(tower_sha256)
    return cached_images(features, job.model) if replica.takes_images else no_images


def _plan_sha256(pointers: DataPointers, sequence: PackedBatchSampler) -> str:
    """Digest of everything that decides which rows a step reads. Prepared data is addressed by content."""
    decides = [pointers.prepared_uri.rpartition("/")[2], sequence.global_batch_size, sequence.plan(0).digest()]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def _record(
    job: JobConfig, strategy: Strategy, data: TrainingData, built: BuiltModel, worker: ProcessContext
) -> CommitRecord:
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
        degrees=[job.train.tensor_parallel, job.train.pipeline_parallel, job.train.context_parallel],
        total_steps=data.total_steps,
    )
