"""Rules across sections: settings that each section allows, but not together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.config.rules.benchmarks import benchmark_problems
from vlmpipe.config.rules.deploy import deploy_problems
from vlmpipe.config.rules.external_trainer import external_trainer_problems
from vlmpipe.config.rules.hub import hub_problems
from vlmpipe.config.rules.quantize import quantize_problems
from vlmpipe.config.rules.replay import replay_problems
from vlmpipe.config.rules.shared_prefix import shared_prefix_problems
from vlmpipe.config.sections.cluster import FLEX_START_MAX_TIMEOUT_S, duration_s
from vlmpipe.config.validation_errors import Problem
from vlmpipe.trainer.config.deepspeed_keys import NODE_COPY
from vlmpipe.trainer.config.model import MAX_ASPECT
from vlmpipe.trainer.config.strategies import DECOMPOSING
from vlmpipe.trainer.config.train import best_problem
from vlmpipe.trainer.hooks.rules import rules_of
from vlmpipe.trainer.sizing.deepspeed_config import node_copy_ranks
from vlmpipe.trainer.storage.base import in_bucket

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields

ALL_REDUCE_STRATEGIES = ("ddp", "zero1", "zero2", "hsdp")


def section_problems(config: RunFields) -> Iterator[Problem]:
    """Yield the problems between sections of a run file without stages."""
    model, train, register = config.model, config.train, config.register_
    is_trained, is_cached = "tower" not in model.freeze, config.features.cache == "on"
    if is_cached and is_trained:
        what = "has adapters" if model.lora and "tower" in model.lora.parts else "is trained"
        text = f"found on, but the tower {what}, so its output changes; expected tower in model.freeze, or off"
        yield Problem("features.cache", text)
    for rules in rules_of(config):
        yield from (Problem(field, text) for field, text in rules.problems(config))
    if model.lora and not train.epochs:
        yield Problem(
            "train.epochs", "found 0 with model.lora, whose adapters need training; expected more, or model.lora null"
        )
    yield from external_trainer_problems(config)
    yield from replay_problems(config)
    yield from shared_prefix_problems(config)
    yield from _sample_problems(config)
    yield from _slice_problems(config)
    yield from _mirror_problems(config)
    yield from _adapter_problems(config)
    if model.image_kind == "grids" and config.data.max_image_aspect > MAX_ASPECT:
        refused = f"found {config.data.max_image_aspect:g} with model.family {model.family}"
        text = f"{refused}, whose images keep their shape; expected at most {MAX_ASPECT:g}"
        yield Problem("data.max_image_aspect", text)
    yield from _rank_problems(config)
    if not 0 < config.data.validation_fraction < 1:
        yield Problem(
            "data.validation_fraction",
            f"found {config.data.validation_fraction:g}, expected more than 0 and less than 1: a run trains on one "
            "part of its samples and is evaluated on the other",
        )
    if config.checkpoint.export == "best" and train.trainer is None and (problem := best_problem(train, "export best")):
        yield Problem("checkpoint.export", problem)
    yield from _capacity_problems(config)
    for name in sorted(config.secrets.keys() & config.cluster.env.keys()):
        yield Problem(f"secrets.{name}", "found in cluster.env too, which is set first; expected one of both")
    if config.gate.bounds == "required" and not config.gate.checks_something:
        text = (
            "found no bound, with which no model is accepted; expected min_margin_over_chance or another, or gate: none"
        )
        yield Problem("gate", text)
    shuffled = config.gate.min_margin_over_shuffled_image is not None
    if shuffled and "shuffled_image" not in config.evaluate.controls and train.trainer is None:
        text = "found without shuffled_image in evaluate.controls, where it is measured; expected both or null"
        yield Problem("gate.min_margin_over_shuffled_image", text)
    if "cider_d" in config.gate.min_scores and config.evaluate.cider_d == "off":
        text = "found with evaluate.cider_d off, which gives none; expected auto or on"
        yield Problem("gate.min_scores.cider_d", text)
    if "preference_accuracy" in config.gate.min_scores and not train.in_pairs:
        text = f"found with train.objective {train.objective}, which has no pairs; expected objective dpo or simpo"
        yield Problem("gate.min_scores.preference_accuracy", text)
    yield from benchmark_problems(config)
    yield from quantize_problems(config)
    yield from deploy_problems(config)
    yield from hub_problems(config)
    if register.registry.startswith("vertex://"):
        missing = f"missing, found register.registry {register.registry}; expected"
        if register.serving is None and config.deploy is None:
            text = f"{missing} image_uri of a serving container, which Vertex AI asks for, or a section deploy"
            yield Problem("register.serving", text)
        if not config.gcp.project:
            yield Problem("gcp.project", f"{missing} the project that holds the model")


def _slice_problems(config: RunFields) -> Iterator[Problem]:
    """Fields of records that no source has, or that are named twice."""
    data = config.data
    if not data.slices:
        return
    if len(set(data.slices)) < len(data.slices):
        yield Problem("data.slices", "found a field twice; expected fields that differ")
    uris = [source.uri for source in data.by_field().values() if source.uri]
    if uris and all(uri.startswith("builtin:") for uri in uris):
        text = "whose samples have no records with fields; expected a source of your own, or no slices"
        yield Problem("data.slices", f"found with {uris[0]}, {text}")


def _sample_problems(config: RunFields) -> Iterator[Problem]:
    """A mean sample of the plan section that no packed sequence holds: preparation would reject or cut most samples."""
    plan, data = config.plan, config.data
    if plan.sample_images > data.max_images_per_sequence:
        text = f"found {plan.sample_images:g}, and a packed sequence holds at most {data.max_images_per_sequence}"
        yield Problem(
            "plan.sample_images", f"{text} images; expected no more, or a higher data.max_images_per_sequence"
        )
    if plan.sample_tokens > data.sequence_length:
        text = f"found {plan.sample_tokens:,}, and a packed sequence has {data.sequence_length:,}"
        yield Problem("plan.sample_tokens", f"{text} tokens; expected no more, or a higher data.sequence_length")


def _mirror_problems(config: RunFields) -> Iterator[Problem]:
    """A mirror that would be lost with the run."""
    mirror = config.checkpoint.mirror_uri
    for field, root in ("output.root_uri", config.output.root_uri), ("gcp.pipeline_root", config.gcp.pipeline_root):
        if not (mirror and root) or in_bucket(mirror) != in_bucket(root):
            continue
        if in_bucket(mirror):
            where, is_shared = "bucket", mirror.split("/")[:3] == root.split("/")[:3]
        else:
            where, is_shared = "folder", Path(mirror).resolve().is_relative_to(Path(root).resolve())
        if is_shared:
            text = f"found {mirror}, in the {where} of {field}, with which it would be lost; expected another {where}"
            yield Problem("checkpoint.mirror_uri", text)
            return


def _adapter_problems(config: RunFields) -> Iterator[Problem]:
    model, train, lora = config.model, config.train, config.model.lora
    if lora is None:
        return
    if lora.use_dora and train.strategy not in DECOMPOSING:
        expected = f"expected one of {', '.join(DECOMPOSING)}, such as fsdp"
        text = f"found true with train.strategy {train.strategy}, which shards the weights it measures; {expected}"
        yield Problem("model.lora.use_dora", text)
    if set(lora.parts) != {"language_model"} and train.tensor_parallel > 1:
        text = f"found with train.strategy {train.strategy}, which shards adapters of the language model only"
        yield Problem("model.lora.parts", f"{text}; expected [language_model], or a strategy such as fsdp")
    alone = {"export": lora.export == "adapter", "pretrained": bool(lora.pretrained)}
    for name in (name for name, is_set in alone.items() if is_set):
        if not (model.pretrained and model.pretrained.weights):
            text = "found without model.pretrained.weights, the base that an adapter belongs to; expected that, such as"
            yield Problem(f"model.lora.{name}", f"{text} run:RUN_ID of a run that exported the whole model")
    if lora.export == "adapter" and config.register_.serving:
        text = "found with model.lora.export adapter, which a serving container has no base for; expected merged"
        yield Problem("register.serving", text)


def _rank_problems(config: RunFields) -> Iterator[Problem]:
    """Return whether ranks divide into model replicas, and the batch into micro-batches."""
    train, cluster, length = config.train, config.cluster, config.data.sequence_length
    copies = node_copy_ranks(train, nodes=cluster.replica_count, node_ranks=cluster.processes)
    if copies not in (0, cluster.processes):
        expected = f"{cluster.processes}, the processes of a node, which share its copy of the weights"
        yield Problem("train.deepspeed", f"{NODE_COPY}: found {copies}, expected {expected}")
    if cluster.processes % train.tensor_parallel:
        expected = f"a divisor of the {cluster.processes} processes of a node: layers are split inside a node"
        yield Problem("train.tensor_parallel", f"found {train.tensor_parallel}, expected {expected}")
    if train.sequence_parallel and length % train.tensor_parallel:
        expected = f"a multiple of train.tensor_parallel {train.tensor_parallel}"
        text = f"found with data.sequence_length {length}, expected {expected}: its ranks share a sequence's tokens"
        yield Problem("train.sequence_parallel", text)
    if length % train.context_parallel:
        text = f"found {train.context_parallel} with data.sequence_length {length}, expected a divisor of it"
        yield Problem("train.context_parallel", text)
    in_node = cluster.processes % train.context_parallel == 0 or train.context_parallel % cluster.processes == 0
    if cluster.world_size % train.context_parallel or not in_node:
        expected = f"a divisor of the {cluster.processes} processes of a node, or whole nodes that divide all"
        yield Problem("train.context_parallel", f"found {train.context_parallel}, expected {expected}")
    if cluster.world_size % train.model_ranks:
        problem = f"found {train.pipeline_parallel} with train.tensor_parallel {train.tensor_parallel}"
        text = f"{problem}, expected ranks ({cluster.world_size}) that are a multiple of {train.model_ranks}"
        yield Problem("train.pipeline_parallel", text)
    if train.profile and max(train.profile.ranks) >= cluster.world_size:
        text = f"found {list(train.profile.ranks)}, expected ranks from 0 to {cluster.world_size - 1}"
        yield Problem("train.profile.ranks", text)
    if train.profile and 0 < train.max_steps < train.profile.last_step:
        text = f"found steps up to {train.profile.last_step}, expected none after train.max_steps {train.max_steps}"
        yield Problem("train.profile", text)
    groups = max(1, cluster.world_size // train.sequence_ranks)
    step_sequences = groups * train.micro_batch_size
    if train.global_batch_size % step_sequences:
        shared = f", {train.sequence_ranks} with the same sequences" if train.sequence_ranks > 1 else ""
        yield Problem(
            "train.global_batch_size",
            f"found {train.global_batch_size}, expected a multiple of {step_sequences} = {groups} "
            f"{'groups' if shared else 'ranks'} (cluster.replica_count {cluster.replica_count} x {cluster.processes} "
            f"processes{shared}) x train.micro_batch_size {train.micro_batch_size}",
        )


def _region_problems(config: RunFields) -> Iterator[Problem]:
    """Options of the fallback in other regions, with settings that name something of one region."""
    gcp, field = config.gcp, "cluster.capacity_fallback"
    for option in config.cluster.capacity_fallback:
        if option.location == gcp.location:
            yield Problem(field, f"found location {option.location}, which is gcp.location; expected another, or none")
        elif option.location:
            for name in ("psc_interface_config", "encryption_spec_key_name"):
                if getattr(gcp, name):
                    text = f"found {option.name} with gcp.{name}, which is of {gcp.location}; expected no other region"
                    yield Problem(field, text)


def _capacity_problems(config: RunFields) -> Iterator[Problem]:
    cluster, fallback = config.cluster, config.cluster.capacity_fallback
    if fallback and config.gcp.persistent_resource_id:
        text = "found with gcp.persistent_resource_id, whose machines exist already"
        yield Problem("cluster.capacity_fallback", text)
    yield from _region_problems(config)
    flex_start = "cluster.scheduling_strategy" if cluster.scheduling_strategy == "flex_start" else ""
    if any(option.scheduling_strategy == "flex_start" for option in fallback):
        flex_start = "cluster.capacity_fallback"
    if cluster.reduction_server:
        for text in _reduction_server_problems(config, flex_start):
            yield Problem("cluster.reduction_server", text)
    if flex_start and not cluster.accelerator_count:
        yield Problem(flex_start, "found flex_start without GPUs, expected accelerator_type and _count")
    if flex_start and duration_s(cluster.timeout) > FLEX_START_MAX_TIMEOUT_S:
        text = f"found {cluster.timeout}, expected at most {FLEX_START_MAX_TIMEOUT_S}s with flex_start"
        yield Problem("cluster.timeout", text)


def _reduction_server_problems(config: RunFields, flex_start: str) -> Iterator[str]:
    """`flex_start`: the field that asks for it, if any."""
    if config.cluster.replica_count < 2:
        yield "found with 1 node, expected cluster.replica_count of at least 2, or null"
    if config.train.strategy not in ALL_REDUCE_STRATEGIES and not config.train.trainer:
        yield (
            f"found with train.strategy {config.train.strategy}, which sums no gradients by all-reduce, so reducers "
            f"would idle; expected one of {', '.join(ALL_REDUCE_STRATEGIES)}, or null"
        )
    if not config.cluster.accelerator_count:
        yield "found without GPUs, expected GPU nodes (it works through NCCL)"
    if flex_start:
        yield f"found with {flex_start} flex_start, which needs equal machines in all pools; expected null"
