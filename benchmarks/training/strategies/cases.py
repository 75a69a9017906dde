"""Which runs take turns in one process group: every strategy beside ddp, training features beside none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.trainer.memory_cases import Case
from tests.support.trainer.tiny_runs import strategy_changes
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape

MICRO_BATCHES = 4  # of a global step, whatever the number of copies: a pipeline of two stages wants them
ROWS = SequenceShape(sequences=2, tokens=256, images=4, label_tokens=192)  # of a micro-batch
QUICK_ROWS = SequenceShape(sequences=2, tokens=64, images=2, label_tokens=48)
VOCABULARY, LARGE_VOCABULARY = 300, 8000
EQUAL = 1e-5  # relative: fp32 sums in another order
ROUNDED = 5e-3  # gradients of bf16, as in tests/integration/trainer/strategies/test_equalities.py
QUANTIZED = 5e-2  # another base: of a model drawn at random, whose loss is near that of a guess

LANGUAGE = "model.language_model.config"
COMMON: dict[str, Any] = {
    "train.deterministic": False,
    "train.loss_chunk_tokens": 1024,
    "train.clip_grad_norm": 1.0,
    "train.optimizer.learning_rate": 1e-3,
}
# A step takes about a CPU second of each rank. Layers divide into the four stages of an interleaved pipeline.
SIZES = {
    f"{LANGUAGE}.num_hidden_layers": 8,
    f"{LANGUAGE}.hidden_size": 256,
    f"{LANGUAGE}.intermediate_size": 688,
}
QUICK_SIZES = {
    f"{LANGUAGE}.num_hidden_layers": 4,
    f"{LANGUAGE}.hidden_size": 64,
    f"{LANGUAGE}.intermediate_size": 128,
}


@dataclass(frozen=True)
class TimedRun:
    """One side. Its losses are those of its group's baseline within EQUAL: all of them, or with what changes gradients
    the first `equal`; where it only rounds them, all are within `rounded`."""

    strategy: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: int = VOCABULARY
    equal: int | None = None
    rounded: float | None = None

    def case(self, world_size: int, *, quick: bool) -> Case:
        """Of `world_size` processes, with their part of a step's MICRO_BATCHES for each copy of the model."""
        ranks = {**strategy_changes(self.strategy), **self.changes}
        of_a_copy = ranks.get("train.tensor_parallel", 1) * ranks.get("train.pipeline_parallel", 1)
        return Case(
            self.strategy,
            {**COMMON, **(QUICK_SIZES if quick else SIZES), **self.changes},
            passes=MICRO_BATCHES * of_a_copy // world_size,
            rows=QUICK_ROWS if quick else ROWS,
            vocabulary=self.vocabulary,
        )


@dataclass(frozen=True)
class Group:
    """Runs that take turns in one process group; the first is the baseline of the others."""

    part: str  # of bench_train
    processes: int
    runs: Mapping[str, TimedRun]

    @property
    def baseline(self) -> str:
        return next(iter(self.runs))

    @property
    def others(self) -> list[str]:
        return list(self.runs)[1:]


def _plain(*strategies: str) -> dict[str, TimedRun]:
    return {strategy: TimedRun(strategy) for strategy in strategies}


def _precisions(strategy: str) -> dict[str, TimedRun]:
    return {
        "autocast": TimedRun(strategy, {"train.precision": "bf16-autocast"}),
        "bf16 state": TimedRun(strategy, {"train.precision": "bf16"}, equal=0, rounded=ROUNDED),
    }


AVERAGED = {"train.ema_decay": 0.999}
BF16: dict[str, Any] = {"train.precision": "bf16"}
ADAPTERS: dict[str, Any] = {"rank": 8}
GROUPS = {
    "two processes": Group("strategies", 2, _plain("ddp", "fsdp", "zero1", "zero2", "zero3", "pp")),
    "four processes": Group("strategies", 4, _plain("ddp", "hsdp", "tp", "tp+pp+dp")),
    "ddp": Group(
        "features",
        2,
        {
            "none": TimedRun("ddp"),
            "EMA": TimedRun("ddp", AVERAGED),
            "full checkpointing": TimedRun("ddp", {"train.activation_checkpointing": "full"}),
            "selective checkpointing": TimedRun("ddp", {"train.activation_checkpointing": "selective"}),
            "gradients as bf16": TimedRun("ddp", {"train.gradient_compression": "bf16"}, equal=1, rounded=ROUNDED),
        },
    ),
    "ddp, large vocabulary": Group(
        "features",
        2,
        {
            "none": TimedRun("ddp", {"train.loss_chunk_tokens": 0}, LARGE_VOCABULARY),
            "loss in chunks": TimedRun("ddp", {"train.loss_chunk_tokens": 48}, LARGE_VOCABULARY),
        },
    ),
    "fsdp": Group("features", 2, {"none": TimedRun("fsdp"), "EMA": TimedRun("fsdp", AVERAGED)}),
    "tp": Group(
        "features",
        2,
        {"none": TimedRun("tp"), "sequence parallelism": TimedRun("tp", {"train.sequence_parallel": True})},
    ),
    "ddp, precision": Group("precision", 2, _precisions("ddp")),
    "zero2, precision": Group("precision", 2, _precisions("zero2")),
    "8-bit moments": Group(
        "precision",
        2,
        {
            "AdamW": TimedRun("fsdp", BF16),
            "adamw_8bit": TimedRun("fsdp", BF16 | {"train.optimizer.name": "adamw_8bit"}, equal=1, rounded=ROUNDED),
        },
    ),
    "adapters": Group(
        "precision",
        2,
        {
            "frozen in bf16": TimedRun("ddp", BF16 | {"model.lora": ADAPTERS}),
            "frozen in nf4": TimedRun(
                "ddp", BF16 | {"model.lora": ADAPTERS | {"quantize_base": "nf4"}}, equal=0, rounded=QUANTIZED
            ),
        },
    ),
    "pp": Group("features", 2, {"none": TimedRun("pp"), "interleaved": TimedRun("pp", {"train.virtual_stages": 2})}),
}
