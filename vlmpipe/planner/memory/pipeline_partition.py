"""Pipeline stages as the trainer partitions them, and the parameters of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.sizing.flops import SequenceFlops, flops_per_sequence
from trainer.sizing.model_shape import ModelShape, Part
from trainer.sizing.pipeline_partition import Stage, stages_of
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.parallel_layout import Layout
from vlmpipe.planner.workload import Workload


def planned_stages(
    config: RunConfig, shape: ModelShape, layout: Layout, load: Workload, *, cached: bool
) -> tuple[Stage, ...]:
    """Where the trainer will cut the model for rows like these. Raises ConfigError for more stages than layers."""
    row = sequence_flops(config, load.sized(shape), load, cached=cached)
    return tuple(stages_of(shape.language.layers, layout.stages, row, image_layers=shape.image_layers))


def sequence_flops(config: RunConfig, shape: ModelShape, load: Workload, *, cached: bool) -> SequenceFlops:
    """What the hardware computes for a row of this run."""
    return flops_per_sequence(
        shape,
        sequence_length=load.sequence_length,
        images=load.images_per_sequence,
        label_tokens=load.label_tokens_per_sequence,
        cached=cached,
        activation_checkpointing=config.train.activation_checkpointing,
        loss_chunks=config.train.loss_chunks(config.train.micro_batch_size * load.label_tokens_per_sequence),
        feature_layer=config.model.feature_layer,
        sample_pairs=load.sample_pairs_per_sequence,
    )


def by_rank(stages: Sequence[Stage], layout: Layout) -> tuple[Stage, ...]:
    """What each rank of a pipeline has of them."""
    ranks = layout.pipeline_parallel
    return tuple(Stage.joined(stages[rank::ranks]) for rank in range(ranks))


@dataclass(frozen=True)
class StageWeights:
    """Parameters of one stage."""

    trainable: int
    frozen: int

    @classmethod
    def of(cls, shape: ModelShape, stage: Stage, *, cached: bool, tensor_parallel: int) -> StageWeights:
        """On each of the ranks that split the stage's layers."""
        ranks, language = tensor_parallel, shape.language
        layer = language.layer_parameters - language.matrices + language.matrices // ranks

        def whole(part: Part) -> int:
            return shape.of_tensor_rank(part, shape.parameters[part], ranks)

        def trained(part: Part) -> int:
            return shape.trained_on_rank(part, ranks)

        of_layers = sum(shape.trained_in_layer(number, ranks) for number in stage.layers)
        trainable = _parameters(shape, trained, of_layers, shape.trained, stage, cached=cached)
        of_stage = _parameters(shape, whole, layer * len(stage.layers), shape.parameters, stage, cached=cached)
        return cls(trainable, of_stage - trainable)


def _parameters(
    shape: ModelShape,
    mine: Callable[[Part], int],
    in_layers: int,
    counts: dict[Part, int],
    stage: Stage,
    *,
    cached: bool,
) -> int:
    language = shape.language
    found = in_layers + mine("adapters") * len(stage.layers) // language.layers
    if stage.is_first:
        found += mine("embedding") + mine("projector") + (0 if cached else mine("tower"))
    if stage.is_last:
        in_all_layers = language.layer_parameters * language.layers
        if counts is not shape.parameters and shape.chosen:
            in_all_layers = sum(shape.chosen.language.parameters)
        final_norm = max(0, counts["language_layers"] - in_all_layers)
        # A tied matrix lies at both ends.
        found += final_norm + (mine("embedding") if shape.tied_head and not stage.is_first else mine("head"))
    return found
