"""The model with its first weights, before it is sharded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import nn

from vlmpipe.trainer.checkpoint.random_states import seed_random_states
from vlmpipe.trainer.config.job import JobConfig, defers_weights
from vlmpipe.trainer.data.chat.added_tokens import require_trained_tokens, trained_tokens
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.distributed.agreement import on_first
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.hooks.features import features_of
from vlmpipe.trainer.models.base import Family, Weights
from vlmpipe.trainer.models.layers.freeze import frozen_weights, require_frozen_tower, require_something_trained, trains
from vlmpipe.trainer.models.layers.lora import train_rows_only
from vlmpipe.trainer.setup.data import mean_sequence_flops
from vlmpipe.trainer.setup.open_run import OpenRun
from vlmpipe.trainer.setup.shared_prefix import require_shared_prefix
from vlmpipe.trainer.sizing.flops import SequenceFlops
from vlmpipe.trainer.sizing.pipeline_partition import stages_of
from vlmpipe.trainer.strategies.frozen_weights import shared_sha256
from vlmpipe.trainer.weights_digest import weights_sha256


@dataclass(frozen=True)
class BuiltModel:
    """The model with its first weights, before it is sharded, and the identity of weights that are not trained."""

    model: nn.Module
    deferred: Weights | None  # values of parameters that have none before they are sharded
    sequence_flops: SequenceFlops | None  # of a mean packed sequence, which pipeline stages are balanced by
    tower_sha256: str  # empty for a tower that is trained
    frozen_sha256: str  # empty where nothing is frozen
    num_parameters: int
    num_trainable: int


def build_model(run: OpenRun) -> BuiltModel:
    """The model on the CPU; where the strategy shards stored weights, without them (`BuiltModel.deferred`). Collective.

    Raises ConfigError, before building it, where it cannot be sharded or split into stages.
    """
    job, family, data, worker = run.job, run.family, run.data, run.worker
    if job.train.tensor_parallel > 1:
        from vlmpipe.trainer.strategies.tensor_parallel.plan import (
            require_shardable,  # DTensor alone takes most of a second
        )

        shares = job.train.sequence_parallel
        require_shardable(job.model, job.train.tensor_parallel, cached=data.cached, sequence=shares)
    if job.train.context_parallel > 1:
        from vlmpipe.trainer.strategies.context_parallel import require_context_parallel

        require_context_parallel(job.model, job.train.context_parallel)
    if job.data.share_prefix == "on":
        require_shared_prefix(job.model)
    sequence_flops = None
    if job.train.pipeline_parallel > 1:
        from vlmpipe.trainer.strategies.pipeline_parallel.requirement import require_stages

        require_stages(job.model)
        shape = family.shape(job.model)
        sequence_flops = mean_sequence_flops(job, shape, data.sampler, cached=data.cached)
        stages_of(shape.language.layers, job.train.stages, sequence_flops, image_layers=shape.image_layers)
    remark = family.require_trainable(job.model, pack=job.data.pack, cached=data.cached)
    if remark and worker.is_first:
        print(f"train: {remark}", flush=True)
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
    seed_random_states(job.train.seed, run.replica, step=0)
    return built


def _tower_sha256(job: JobConfig, family: Family, tower: nn.Module | None, worker: ProcessContext) -> str:
    """Digest of a frozen vision encoder, by rank 0 for all: the others neither read it, where it is None, nor hash it.
    Collective."""

    def digest() -> str:
        return weights_sha256(family.build_tower(job.model) if tower is None else tower)

    return on_first(worker, digest) if worker.world_size > 1 else digest()


def with_weights_from_data(run: OpenRun, built: BuiltModel, loader: PackedLoader) -> BuiltModel:
    """The model with the weights that its features take from data."""
    deferred = built.deferred
    for feature in features_of(run.job):
        deferred = feature.fill_from_data(
            built.model,
            deferred,
            lambda count: [loader.pack_sequence(sequence) for sequence in run.data.sampler.first_sequences(count)],
        )
    return dataclasses.replace(built, deferred=deferred)
