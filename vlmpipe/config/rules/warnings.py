"""Settings that are allowed but have no effect or are probably not intended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vlmpipe.config.rules.external_trainer import command_warnings, unused_settings
from vlmpipe.config.validation_errors import Problem
from vlmpipe.trainer.config.data import OWN_FORMAT
from vlmpipe.trainer.config.deepspeed_keys import NODE_COPY
from vlmpipe.trainer.config.train_fields import ONE_OF_TWO
from vlmpipe.trainer.hooks.rules import rules_of
from vlmpipe.trainer.sizing.deepspeed_config import node_copy_ranks, requested_copy_ranks
from vlmpipe.trainer.storage.base import in_bucket

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields
    from vlmpipe.trainer.config.model import ModelConfig
    from vlmpipe.trainer.sizing.model_shape import LeftOut, ModelShape


def setting_warnings(config: RunFields) -> Iterator[Problem]:
    """Yield the warnings of a run file without stages: settings that have no effect, or a doubtful one."""
    cluster, data, train = config.cluster, config.data, config.train
    yield from unused_settings(config)
    yield from command_warnings(config)
    if data.answer_end and data.chat_format(config.model) == OWN_FORMAT:
        yield Problem("data.answer_end", "has no effect: data.chat_template vlmpipe ends answers itself")
    for field, source in data.by_field().items():
        if source.image_folder and (source.uri.startswith("builtin:") or source.uri.endswith(".tar")):
            yield Problem(f"{field}image_folder", f"has no effect: {source.uri} brings its own images")
    if data.sources and data.weights(0) is None and "stopping_strategy" in data.model_fields_set:
        yield Problem("data.stopping_strategy", "has no effect: the sources have no weights")
    if data.max_questions_per_image and data.share_prefix == "off":
        yield Problem("data.max_questions_per_image", "has no effect: only data.share_prefix puts samples together")
    if "shard_reading" in data.model_fields_set and not in_bucket(config.output.root_uri):
        yield Problem("data.shard_reading", "has no effect: output.root_uri is a folder, and shards are read in place")
    for name in config.tune.parameters if config.tune else ():
        other = ONE_OF_TWO.get(name.removeprefix("train."), "")
        if other in config.train.model_fields_set and getattr(config.train, other) is not None:
            yield Problem(f"train.{other}", f"has no effect on trials: tune searches {name}")
    if cluster.capacity_fallback and "scheduling_strategy" not in cluster.model_fields_set:
        text = "is left at standard, which features and evaluation use: capacity_fallback is for the training job only"
        yield Problem("cluster.scheduling_strategy", text)
    if "max_wait_duration" in cluster.model_fields_set and cluster.scheduling_strategy != "flex_start":
        text = "has no effect: only cluster.scheduling_strategy flex_start waits"
        yield Problem("cluster.max_wait_duration", text)
    if "decay_fraction" in train.model_fields_set and train.lr_schedule != "wsd":
        yield Problem("train.decay_fraction", "has no effect: only train.lr_schedule wsd has a decay of its own")
    yield from _rates_of_frozen_parts(config)
    if train.tower_activation_checkpointing and _freezes_tower(config.model):
        yield Problem("train.tower_activation_checkpointing", "has no effect: the tower is frozen (model.freeze)")
    for rules in rules_of(config):
        doubts = rules.warnings(config, has_gpus=bool(cluster.accelerator_count))
        yield from (Problem(field, text) for field, text in doubts)
    nodes, node_ranks = cluster.replica_count, cluster.processes
    copies = requested_copy_ranks(train)
    if copies and not node_copy_ranks(train, nodes=nodes, node_ranks=node_ranks):
        why = "one node already has all weights"
        if nodes > 1:
            why = "with one process a node, or for one rank, the copy would be whole, which is strategy zero2"
        yield Problem("train.deepspeed", f"{NODE_COPY} has no effect: {why}")
    rejoins = train.trainer is not None and not train.trainer.uses_allreduce  # parameter servers await their workers
    if cluster.replica_count > 1 and not cluster.restart_job_on_worker_restart and not rejoins:
        text = "is false with several nodes: one that Vertex AI restarts cannot rejoin the others, and the job hangs"
        yield Problem("cluster.restart_job_on_worker_restart", text)
    if config.checkpoint.export_dtype == "bf16" and config.model.exports_adapter:
        text = "has no effect: adapters are exported in fp32, and added to the base in it"
        yield Problem("checkpoint.export_dtype", text)
    if config.register_.serving and not config.register_.registry.startswith("vertex://"):
        yield Problem("register.serving", "has no effect: only register.registry vertex://MODEL_ID serves")
    if config.gate.bounds == "none":
        yield Problem("gate", "is none: every model is accepted and registered")
    for path, image in (("cluster.image_uri", cluster.image_uri), ("gcp.pipeline_image", config.gcp.pipeline_image)):
        if image and "@sha256:" not in image:
            yield Problem(path, "names an image by tag, which may change; a digest (@sha256:...) does not")


def _freezes_tower(model: ModelConfig) -> bool:
    adapted = model.lora.parts if model.lora else ()
    return "tower" in model.freeze and not model.train_parameters and "tower" not in adapted


def _rates_of_frozen_parts(config: RunFields) -> Iterator[Problem]:
    """Own learning rates of parts of which nothing is trained. Patterns may thaw some of a part, so with these any."""
    model, optimizer = config.model, config.train.optimizer
    if model.train_parameters or not config.train.epochs:
        return
    for part, rate in (("tower", optimizer.tower_learning_rate), ("projector", optimizer.projector_learning_rate)):
        if rate and part in model.freeze:
            text = f"has no effect: the {part} is frozen (model.freeze)"
            yield Problem(f"train.optimizer.{part}_learning_rate", text)


def rates_without_effect(config: RunFields, shape: ModelShape) -> list[Problem]:
    """Own learning rates of parts of which name patterns leave nothing to train; `setting_warnings` knows no names."""
    model, optimizer = config.model, config.train.optimizer
    rates = (
        ("tower", optimizer.tower_learning_rate, shape.trains_tower),
        ("projector", optimizer.projector_learning_rate, shape.trains_projector),
    )
    return [
        Problem(
            f"train.optimizer.{part}_learning_rate",
            f"has no effect: name patterns leave nothing of the {part} to train",
        )
        for part, rate, trains in rates
        if rate and not trains and (part not in model.freeze or model.train_parameters) and not config.train.trainer
    ]


def layers_without_adapters(shape: ModelShape) -> list[Problem]:
    """Return what the default of `model.lora.targets` leaves out, with its share."""
    if not shape.without_adapters:
        return []
    whole = shape.parameters["language_layers"]
    groups: dict[str, list[LeftOut]] = {}
    for layers in shape.without_adapters:
        groups.setdefault(layers.reason, []).append(layers)
    parts = [
        f"{', '.join(layers.name for layers in some)} ({_share(some, whole)}, {reason})"
        for reason, some in groups.items()
    ]
    text = f"leaves {_share(shape.without_adapters, whole)} of the language model's layers without adapters: "
    return [Problem("model.lora", text + "; ".join(parts))]


def shape_warnings(config: RunFields, shape: ModelShape) -> list[Problem]:
    """Doubts that take the model's sizes."""
    return [
        *rates_without_effect(config, shape),
        *layers_without_adapters(shape),
        *unbalanced_routers(config, shape),
        *delta_rules(config, shape),
    ]


def unbalanced_routers(config: RunFields, shape: ModelShape) -> list[Problem]:
    """Return that experts are trained without a loss that balances them."""
    if not shape.routers or config.train.router_loss or config.train.trainer:
        return []
    text = (
        f"is 0: the experts of {shape.routers} routers are trained without a loss that balances them, transformers' "
        "default, right for short tunings; a model's own coefficient is its router_aux_loss_coef"
    )
    return [Problem("train.router_loss", text)]


def delta_rules(config: RunFields, shape: ModelShape) -> list[Problem]:
    """Return what gated delta rules keep on GPUs, which depends on a package of the image that no plan sees."""
    rules = shape.delta_rules
    if not rules or not config.cluster.accelerator_count or config.train.trainer:
        return []
    text = (
        f"has {rules.layers} layers of gated delta rules, whose memory is counted as that of torch's own code: "
        f"{rules.torch_bytes / 1e3:,.0f} kB a token and layer. An image of make build EXTRAS=linear-attention has "
        f"a faster kernel, which keeps {rules.kernel_bytes / 1e3:,.0f} kB by its source; training says which one runs"
    )
    return [Problem("model", text)]


def _share(some: Sequence[LeftOut], whole: int) -> str:
    return f"{sum(layers.parameters for layers in some) / whole:.2%}"
