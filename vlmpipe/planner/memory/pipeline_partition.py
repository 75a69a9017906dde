"""Pipeline stages as the trainer partitions them, and the parameters of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.parallel_layout import Layout
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.sizing.flops import SequenceFlops, flops_per_sequence
from vlmpipe.trainer.sizing.model_shape import ADAPTERS, OF_LANGUAGE_MODEL, PARTS, ModelShape, Part
from vlmpipe.trainer.sizing.pipeline_partition import Stage, stages_of


def planned_stages(
    config: RunConfig, shape: ModelShape, layout: Layout, load: Workload, *, cached: bool
) -> tuple[Stage, ...]:
    """Where the trainer will cut the model for sequences like these. Raises ConfigError for more stages than layers."""
    flops = sequence_flops(config, load.sized(shape), load, cached=cached)
    return stages_of(shape.language.layers, layout.stages, flops, image_layers=shape.image_layers)


def sequence_flops(config: RunConfig, shape: ModelShape, load: Workload, *, cached: bool) -> SequenceFlops:
    """FLOPs that the hardware computes for a sequence of this run."""
    return flops_per_sequence(
        shape,
        sequence_length=load.sequence_length,
        images=load.images_per_sequence,
        label_tokens=load.label_tokens_per_sequence,
        cached=cached,
        activation_checkpointing=config.train.activation_checkpointing,
        recomputes_tower=config.train.tower_activation_checkpointing,
        loss_chunks=config.train.loss_chunks(config.train.micro_batch_size * load.label_tokens_per_sequence),
        feature_layer=config.model.feature_layer,
        sample_pairs=load.sample_pairs_per_sequence,
    )


def by_rank(stages: Sequence[Stage], layout: Layout) -> tuple[Stage, ...]:
    """Layers of each rank of a pipeline."""
    ranks = layout.pipeline_parallel
    if ranks == len(stages):  # a search asks ten thousand times
        return tuple(stages)
    return tuple(Stage.joined(stages[rank::ranks]) for rank in range(ranks))


@dataclass(frozen=True)
class StageWeights:
    """Parameters of one stage on each of the ranks that split its layers, before replicas shard them."""

    trainable: int
    frozen: int
    sliced: int  # those that FSDP shards: trainable ones, and frozen ones of the same part of the model
    sliced_root: int  # of these, outside of layers
    root: int  # trainable ones outside of layers
    layer: int  # trainable ones of a language layer
    last_product: int  # those of the last matrix of its feed-forward part

    @classmethod
    @functools.lru_cache(4096)  # of the class, not of an instance
    def of(cls, shape: ModelShape, stage: Stage, *, cached: bool, tensor_parallel: int) -> StageWeights:
        ranks, language = tensor_parallel, shape.language
        layer = language.layer_parameters - language.matrices + language.matrices // ranks

        def whole(part: Part) -> int:
            return shape.of_tensor_rank(part, shape.parameters[part], ranks)

        def trained(part: Part) -> int:
            return shape.trained_on_rank(part, ranks)

        trained_layers = [shape.trained_in_layer(number, ranks) for number in stage.layers]
        of_trained = _parameters(shape, trained, sum(trained_layers), shape.trained, stage, cached=cached)
        of_stage = _parameters(shape, whole, layer * len(stage.layers), shape.parameters, stage, cached=cached)
        trains_language = any(of_trained[part] for part in OF_LANGUAGE_MODEL)
        sliced = {
            part: count
            for part, count in of_stage.items()
            if part in ADAPTERS or (trains_language if part in OF_LANGUAGE_MODEL else of_trained[part])
        }
        in_tower = shape.of_tensor_rank("tower", shape.tower.layers * shape.tower.layer_parameters, ranks)
        adapters = of_trained["adapters"] // max(1, len(stage.layers))
        largest = max(trained_layers, default=0) + adapters
        frozen_layers = layer * len(stage.layers) if sliced.get("language_layers") else 0

        def outside(counts: dict[Part, int], in_layers: int) -> int:
            in_adapters = counts.get("adapters", 0) + counts.get("tower_adapters", 0)
            return sum(counts.values()) - in_layers - in_adapters - min(counts.get("tower", 0), in_tower)

        return cls(
            trainable=sum(of_trained.values()),
            frozen=sum(of_stage.values()) - sum(of_trained.values()),
            sliced=sum(sliced.values()),
            sliced_root=outside(sliced, frozen_layers),
            root=outside(of_trained, sum(trained_layers)),
            layer=largest,
            last_product=largest * language.hidden * language.intermediate // language.layer_parameters,
        )


def _parameters(
    shape: ModelShape,
    of_rank: Callable[[Part], int],
    in_layers: int,
    counts: dict[Part, int],
    stage: Stage,
    *,
    cached: bool,
) -> dict[Part, int]:
    """By part of the model; the final norm is the head's."""
    language = shape.language
    parameters: dict[Part, int] = dict.fromkeys(PARTS, 0)
    parameters["language_layers"] = in_layers
    parameters["adapters"] = of_rank("adapters") * len(stage.layers) // language.layers
    if stage.is_first:
        parameters["embedding"], parameters["projector"] = of_rank("embedding"), of_rank("projector")
        parameters["tower"] = 0 if cached else of_rank("tower")
        parameters |= {part: of_rank(part) for part in ("tower_adapters", "projector_adapters")}
    if stage.is_last:
        in_all_layers = language.layer_parameters * language.layers
        if counts is not shape.parameters and shape.chosen:
            in_all_layers = sum(shape.chosen.language.parameters)
        final_norm = max(0, counts["language_layers"] - in_all_layers)
        # A tied matrix lies at both ends.
        parameters["head"] = final_norm + (
            of_rank("embedding") if shape.tied_head and not stage.is_first else of_rank("head")
        )
    return parameters
