"""The stages that a pipeline is cut into, as the trainer cuts it, and the parameters of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.config import RunConfig
from pipelines.planner.layout import Layout
from pipelines.planner.row_load import RowLoad
from trainer.flops import flops_per_row
from trainer.models.family import Stage
from trainer.models.shape import ModelShape, Part
from trainer.strategies.pipeline_stages import stages_of


def planned_stages(
    config: RunConfig, shape: ModelShape, layout: Layout, load: RowLoad, *, cached: bool
) -> tuple[Stage, ...]:
    """Where the trainer will cut the model for rows like these. Raises ConfigError for more stages than layers."""
    row = flops_per_row(
        load.sized(shape),
        row_tokens=load.row_tokens,
        images=load.images_per_row,
        label_tokens=load.label_tokens_per_row,
        cached=cached,
        activation_checkpointing=config.train.activation_checkpointing,
        loss_chunks=config.train.loss_chunks(config.train.micro_batch_rows * load.label_tokens_per_row),
        feature_layer=config.model.feature_layer,
    )
    return tuple(stages_of(shape.language.layers, layout.stages, row, image_layers=shape.image_layers))


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
        trainable = _parameters(shape, shape.trained, stage, tensor_parallel, cached=cached)
        return cls(trainable, _parameters(shape, shape.parameters, stage, tensor_parallel, cached=cached) - trainable)


def _parameters(shape: ModelShape, counts: dict[Part, int], stage: Stage, ranks: int, *, cached: bool) -> int:
    def mine(part: Part) -> int:
        return shape.of_tensor_rank(part, counts[part], ranks)

    language = shape.language
    layer = language.layer_parameters - language.matrices + language.matrices // ranks
    in_layers = layer * len(stage.layers) if counts["language_layers"] else 0
    found = in_layers + mine("adapters") * len(stage.layers) // language.layers
    if stage.is_first:
        found += mine("embedding") + mine("projector") + (0 if cached else mine("tower"))
    if stage.is_last:
        final_norm = max(0, counts["language_layers"] - language.layer_parameters * language.layers)
        # A tied matrix lies at both ends.
        found += final_norm + (mine("embedding") if shape.tied_head and not stage.is_first else mine("head"))
    return found
