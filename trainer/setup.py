"""Builds what the loop drives, from the run file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trainer.checkpoint.commit import CommitRecord
from trainer.checkpoint.resume import versions
from trainer.config.job import DataPointers, JobConfig
from trainer.config.train import TrainConfig
from trainer.data.loader import RowLoader
from trainer.data.sampler import RowSequence
from trainer.data.shards.index import Index, SplitIndex
from trainer.data.tokenize import load_tokenizer
from trainer.dataloading.batches import ImageSource, cached_images, no_images, online_images
from trainer.dataloading.readers import open_readers, warnings
from trainer.distributed.data_parallel_rank import Replica, replica_of
from trainer.distributed.process import Worker
from trainer.errors import ConfigError
from trainer.evaluation.validation_loss import HeldOut, held_out_of
from trainer.feature_cache.reader import FeatureReader
from trainer.models.base import Family
from trainer.models.image_processor import image_preparer
from trainer.models.image_tokens import image_form_of
from trainer.models.layers.freeze import frozen_weights, require_frozen_tower, require_something_trained, trains
from trainer.models.layers.recompute_policy import Recompute
from trainer.models.registry import family_of
from trainer.monitoring.forward_timer import WITHOUT_WAITS, ForwardTimer
from trainer.sizing.checkpoint_size import checkpoint_bytes
from trainer.sizing.flops import RowFlops, flops_per_row
from trainer.sizing.model_shape import ModelShape
from trainer.sizing.pipeline_partition import stages_of
from trainer.storage import open_storage
from trainer.strategies.base import Strategy
from trainer.strategies.deepspeed.requirements import require_engine
from trainer.strategies.registry import build_strategy
from trainer.weights_digest import model_sha256, tensors_sha256, weights_sha256

MOST_OF_THE_START = 0.05  # share of the first weights in an average at the end of training, above which it is said


@dataclass(frozen=True)
class Parts:
    """What one rank trains with."""

    strategy: Strategy
    replica: Replica
    loader: RowLoader
    image_source: ImageSource
    record: CommitRecord  # of a checkpoint at step 0; the loop fills in where it is
    total_steps: int
    num_parameters: int
    num_trainable: int
    features: str  # cached | online
    shape: ModelShape
    held_out: HeldOut | None  # where the run validates
    forward_timer: ForwardTimer | None  # where no rank waits for another in a forward pass


def build_parts(job: JobConfig, worker: Worker) -> Parts:
    """Model, data and strategy of this rank. Raises ConfigError before anything large is built where it can."""
    require_engine(job.train, worker)
    replica = replica_of(job.train, worker)
    require_divisible(job, replica)
    pointers = job.pointers()
    cached = pointers.features != "off"
    storage = open_storage(pointers.prepared_uri)
    tokenizer = load_tokenizer(storage)
    index = Index.load(pointers.prepared_uri)
    split, form = index.split("train"), image_form_of(job.model)
    sequence = RowSequence.of(
        split,
        job.data,
        seed=job.train.seed,
        global_batch_rows=job.train.global_batch_rows,
        tile_tokens=form.tile_tokens,
    )
    total_steps = sequence.num_steps(job.train.epochs, at_most=job.train.max_steps)
    family = family_of(job.model)
    if job.train.tensor_parallel > 1:
        from trainer.strategies.tensor_parallel.plan import require_splittable  # DTensor alone takes most of a second

        shares = job.train.sequence_parallel
        require_splittable(job.model, job.train.tensor_parallel, cached=cached, sequence=shares)
    row_flops = None
    if job.train.pipeline_parallel > 1:
        shape = family.shape(job.model)
        row_flops = mean_row_flops(job, shape, split, sequence, cached=cached)
        stages_of(shape.language.layers, job.train.stages, row_flops, image_layers=shape.image_layers)
    model = family.build(job.model, tokenizer)
    torch.manual_seed(replica.count * job.train.seed + replica.index)  # copies do not drop out alike, their ranks do
    tower = family.tower(model)
    if cached:
        require_frozen_tower(job.model, sum(one.numel() for one in tower.parameters() if one.requires_grad))
    tower_sha256 = "" if trains(tower) else weights_sha256(tower)
    frozen = frozen_weights(model)
    frozen_sha256 = tensors_sha256(sorted(frozen.items())) if frozen else ""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    require_something_trained(job.model, num_trainable)
    saved_bytes = checkpoint_bytes(num_trainable, job.train, worker.world_size) // worker.num_nodes
    readers = open_readers(job, set_aside_bytes=saved_bytes)  # a checkpoint keeps its room on this node
    ahead = readers.fetch_ahead(split, sequence, total_steps, job.data.shuffle_shards)
    if worker.is_first:
        for warning in (*warnings(ahead), *_settings_warnings(job.train, total_steps)):
            print(f"train: {warning}", flush=True)
    images = replica.takes_images and not cached
    module = family.training_module(job.model, model, cached=cached).train()
    Recompute.of(job.train).apply(family, module)
    blocks = dataclasses.replace(family.blocks(module), row_flops=row_flops)
    if job.train.compile:
        from trainer.models.layers.compile import compile_layers  # torch's compiler takes seconds to import

        compile_layers(blocks, job.train.compile_backend)
    timer = ForwardTimer(module, worker.device) if job.train.strategy in WITHOUT_WAITS else None
    strategy = build_strategy(job.train, module, blocks, worker)
    if worker.is_first and job.train.strategy.startswith("zero"):
        content = json.dumps(getattr(strategy, "settings", {}), indent=1, sort_keys=True)
        open_storage(job.run.run_uri).write("deepspeed.json", content.encode())
    image_source = _image_source(job, family, readers.features, tower_sha256)
    image_source = image_source if replica.takes_images else no_images
    held_out = held_out_of(
        job, index.split("eval"), tokenizer, readers.samples, image_source, replica, images=images, form=form
    )
    return Parts(
        strategy=strategy,
        replica=replica,
        loader=RowLoader(split, sequence, tokenizer, readers.samples, images=images, ahead=ahead, form=form),
        image_source=image_source,
        record=_record(job, strategy, _plan_sha256(pointers, sequence), worker, tower_sha256, frozen_sha256),
        total_steps=total_steps,
        num_parameters=num_parameters,
        num_trainable=num_trainable,
        features="cached" if cached else "online",
        shape=family.shape(job.model),
        held_out=held_out,
        forward_timer=timer,
    )


def _settings_warnings(settings: TrainConfig, total_steps: int) -> Iterator[str]:
    """Of an average that has no time to forget the weights that training began with, and of a compression that never
    begins."""
    decay, start_step = settings.ema_decay, settings.powersgd.start_step
    left = decay**total_steps if decay else 0.0
    if left >= MOST_OF_THE_START:
        yield (
            f"train.ema_decay {decay:g}: after all {total_steps} steps the average, which is what is exported, is "
            f"still {left:.0%} the weights of the start; a smaller decay forgets them sooner"
        )
    if settings.gradient_rank and start_step >= total_steps:
        yield (
            f"train.powersgd.start_step {start_step}: all {total_steps} steps are before it, so no gradient is "
            "compressed; a smaller one begins sooner"
        )


def require_divisible(job: JobConfig, replica: Replica) -> None:
    """Every rank runs the same number of equal micro-batches."""
    settings = job.train
    if settings.global_batch_rows % (settings.micro_batch_rows * replica.count):
        copies = "processes" if settings.model_ranks == 1 else f"copies of the model on {settings.model_ranks} each"
        raise ConfigError(
            f"train.global_batch_rows {settings.global_batch_rows} does not divide over {replica.count} {copies} "
            f"with train.micro_batch_rows {settings.micro_batch_rows}",
            expected=f"a multiple of {settings.micro_batch_rows * replica.count}",
        )
    if settings.sequence_parallel and job.data.row_tokens % settings.tensor_parallel:
        raise ConfigError(
            f"train.sequence_parallel: {settings.tensor_parallel} ranks cannot share data.row_tokens "
            f"{job.data.row_tokens}",
            expected="tokens of a row that are a multiple of train.tensor_parallel",
        )


def mean_row_flops(
    job: JobConfig, shape: ModelShape, split: SplitIndex, sequence: RowSequence, *, cached: bool
) -> RowFlops:
    """What a row of the first epoch takes, in the mean."""
    rows = sequence.num_rows(0)
    label_tokens = int(split.label_tokens.sum()) / rows
    if images := int(split.image_count.sum()):  # where they differ, the mean one
        shape = shape.of_images(max(1, round(int(split.image_tokens.sum()) / images)))
    return flops_per_row(
        shape,
        row_tokens=job.data.row_tokens,
        images=int(split.tiles(image_form_of(job.model).tile_tokens).sum()) / rows,
        label_tokens=label_tokens,
        cached=cached,
        activation_checkpointing=job.train.activation_checkpointing,
        loss_chunks=job.train.loss_chunks(job.train.micro_batch_rows * label_tokens),
        feature_layer=job.model.feature_layer,
        sample_pairs=split.pairs / rows,
    )


def _image_source(job: JobConfig, family: Family, features: FeatureReader | None, tower_sha256: str) -> ImageSource:
    if features is None:
        return online_images(image_preparer(job.model))
    encoded_by = features.shards.tower_sha256
    if encoded_by not in (None, tower_sha256):
        raise ConfigError(
            f"the cached features in {features.shards.storage.root_uri} come from another tower ({encoded_by})",
            expected=f"the weights of this run's tower ({tower_sha256})",
            fix="pin model.tower.revision, or delete that folder to encode again",
        )
    return cached_images(features, family.feature_shape(job.model))


def _plan_sha256(pointers: DataPointers, sequence: RowSequence) -> str:
    """Digest of everything that decides which rows a step reads. Prepared data is addressed by content."""
    decides = [pointers.prepared_uri.rpartition("/")[2], sequence.global_batch_rows, sequence.plan(0).digest()]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def _record(
    job: JobConfig, strategy: Strategy, plan_sha256: str, worker: Worker, tower_sha256: str, frozen_sha256: str
) -> CommitRecord:
    return CommitRecord(
        attempt=0,
        epoch=0,
        step=0,
        rows_consumed=0,
        world_size=worker.world_size,
        num_nodes=worker.num_nodes,
        strategy=job.train.strategy,
        checkpoint_format=strategy.checkpoint_format,
        plan_sha256=plan_sha256,
        model_sha256=model_sha256(job),
        tower_sha256=tower_sha256,
        frozen_sha256=frozen_sha256,
        versions=versions(),
    )
