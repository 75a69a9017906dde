"""Tiny models under real strategies, whose memory is measured and compared with the planner's estimate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.tiny_runs import TINY, merged
from pipelines.config import RunConfig, parse_run_config
from pipelines.planner.activations import activations, is_cached
from pipelines.planner.layout import layout_of
from pipelines.planner.memory import training_parts
from trainer.models.table import family_of
from trainer.tracing import RowShape

ROWS = RowShape(rows=2, tokens=128, images=4, label_tokens=96)


@dataclass(frozen=True)
class Case:
    """One run to measure. `passes` micro-batches make a step."""

    strategy: str
    changes: dict[str, Any] = field(default_factory=dict)
    passes: int = 2
    cached: bool = True
    rows: RowShape = ROWS
    vocabulary: int = 300

    def config(self, world_size: int) -> RunConfig:
        """The run file of this case."""
        return parse_run_config(
            merged(
                TINY,
                {
                    "model.tower.config.image_size": 32,
                    "model.language_model.config.num_hidden_layers": 4,
                    "model.language_model.config.hidden_size": 128,
                    "model.language_model.config.intermediate_size": 256,
                    "train.strategy": self.strategy,
                    "train.micro_batch_rows": self.rows.rows,
                    "train.global_batch_rows": self.rows.rows * self.passes * world_size,
                    "data.row_tokens": self.rows.tokens,
                    "data.row_images": self.rows.images // self.rows.rows,
                    "cluster.processes_per_replica": world_size,
                    **self.changes,
                },
            ),
            "memory case",
        )


STRATEGIES = ("ddp", "fsdp", "zero2")
CASES = {
    **{strategy: Case(strategy) for strategy in STRATEGIES},
    **{f"{strategy} one pass": Case(strategy, passes=1) for strategy in STRATEGIES},
    **{f"{strategy} bf16": Case(strategy, {"train.precision": "bf16"}) for strategy in STRATEGIES},
    **{f"{strategy} bf16 one pass": Case(strategy, {"train.precision": "bf16"}, passes=1) for strategy in STRATEGIES},
    **{
        f"{strategy} checkpointing": Case(strategy, {"train.activation_checkpointing": "full"})
        for strategy in STRATEGIES
    },
    **{f"{strategy} online": Case(strategy, {"features.cache": "off"}, cached=False) for strategy in STRATEGIES},
    **{
        f"{strategy} tower trained": Case(strategy, {"model.freeze": [], "features.cache": "off"}, cached=False)
        for strategy in STRATEGIES
    },
    **{
        f"{strategy} projector only": Case(strategy, {"model.freeze": ["tower", "language_model"]})
        for strategy in STRATEGIES
    },
}


def predicted(case: Case, processes: int) -> dict[str, int]:
    """The planner's bytes on one rank: what can be counted, and all that is held at the fullest moment."""
    config = case.config(processes)
    shape = family_of(config.model).shape(config.model)
    _, parts = training_parts(
        shape,
        layout_of(config),
        activations(
            config, shape, mixes=[(case.rows.images // case.rows.rows, case.rows.label_tokens // case.rows.rows)]
        ),
        cached=is_cached(config),
        precision=config.train.precision,
        passes=case.passes,
        checkpointing=config.train.activation_checkpointing == "full",
    )
    sizes = {part.name: part.bytes for part in parts}
    return {
        "weights": sizes["weights"] + sizes.get("frozen weights", 0),
        "optimizer": sizes["optimizer"],
        "peak": sum(sizes.values()),
    }
