"""Tiny models under real strategies, whose memory is measured and compared with the planner's estimate
(`tests.support.planner.planned_memory`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.trainer.tiny_native import model_section
from tests.support.trainer.tiny_runs import TINY, merged, strategy_changes
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.trainer.config.weights.origin import PARTS
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape

ROWS = SequenceShape(sequences=2, tokens=128, images=4, label_tokens=96)
LLAVA: dict[str, Any] = {
    "model.tower.config.image_size": 32,
    "model.language_model.config.num_hidden_layers": 4,
    "model.language_model.config.hidden_size": 128,
    "model.language_model.config.intermediate_size": 256,
}
# Images of 4 x 4 tokens, which are 4 windows of Qwen2.5-VL.
NATIVE: dict[str, Any] = {
    "model.max_pixels": 1024,
    "model.pretrained.config.text_config.num_hidden_layers": 5,
    "model.pretrained.config.text_config.hidden_size": 128,
    "model.pretrained.config.text_config.intermediate_size": 256,
    "model.pretrained.config.text_config.rope_parameters.mrope_section": [4, 6, 6],
    "model.pretrained.config.vision_config.depth": 4,
    "model.pretrained.config.vision_config.hidden_size": 32,
    "model.pretrained.config.vision_config.intermediate_size": 48,
    "model.pretrained.config.vision_config.out_hidden_size": 128,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": NATIVE | {"model.pretrained.config.vision_config.fullatt_block_indexes": [1, 3]},
    "qwen3_vl": NATIVE
    | {
        "model.pretrained.config.text_config.head_dim": 32,
        "model.pretrained.config.vision_config.deepstack_visual_indexes": [0, 2],
    },
}


def own_zero(**settings: Any) -> dict[str, Any]:
    """What a user lays over the engine's `zero_optimization`."""
    return {"train.deepspeed": {"zero_optimization": settings}}


@dataclass(frozen=True)
class Case:
    """One run to measure. `passes` micro-batches make a step."""

    strategy: str
    changes: dict[str, Any] = field(default_factory=dict)
    passes: int = 2
    cached: bool = True
    rows: SequenceShape = ROWS
    vocabulary: int = 300
    family: str = "llava"
    copies: int = 1  # of a model in pipeline stages

    @property
    def nodes(self) -> int:
        """Nodes that share the processes: what hybrid sharding and a node's copy of the weights are about."""
        zero = self.changes.get("train.deepspeed", {}).get("zero_optimization", {})
        return 2 if self.strategy == "hsdp" or "zero_hpz_partition_size" in zero else 1

    def config(self, world_size: int) -> RunConfig:
        """The run file of this case."""
        strategy = strategy_changes(self.strategy) | self.changes
        degrees = ("train.tensor_parallel", "train.pipeline_parallel", "train.context_parallel")
        copies = world_size // math.prod(strategy.get(name, 1) for name in degrees)
        base, model = TINY, LLAVA
        if self.family != "llava":
            base, model = TINY | {"model": model_section(self.family)}, OF_FAMILY[self.family]
        return parse_run_config(
            merged(
                base,
                {
                    "model.tokenizer": f"train:{self.vocabulary}",
                    **model,
                    **strategy_changes(self.strategy),
                    "train.micro_batch_size": self.rows.sequences,
                    "train.global_batch_size": self.rows.sequences * self.passes * copies,
                    "data.sequence_length": self.rows.tokens,
                    "data.max_images_per_sequence": self.rows.images // self.rows.sequences,
                    "cluster.replica_count": self.nodes,
                    "cluster.processes_per_replica": world_size // self.nodes,
                    **self.changes,
                },
            ),
            "memory case",
        )


STRATEGIES = ("ddp", "fsdp", "zero2")
AVERAGED = {"train.ema_decay": 0.9}
ADAPTERS_WITH: dict[str, dict[str, Any]] = {
    "": {},
    " bf16": {"train.precision": "bf16"},
    " checkpointing": {"train.activation_checkpointing": "full"},
}
CASES = {
    **{strategy: Case(strategy) for strategy in STRATEGIES},
    # Dropout in attention: samples cannot attend by themselves.
    "ddp under a mask": Case("ddp", {"model.language_model.config.attention_dropout": 0.1}),
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
    **{
        f"{strategy} tower trained in part": Case(
            strategy, {"model.freeze": [], "model.feature_layer": 1, "features.cache": "off"}, cached=False
        )
        for strategy in STRATEGIES
    },
    **{
        f"{strategy} projector only bf16": Case(
            strategy, {"model.freeze": ["tower", "language_model"], "train.precision": "bf16"}
        )
        for strategy in STRATEGIES
    },
    **{
        f"{strategy} adapters{suffix}": Case(strategy, {"model.lora": {"rank": 8}, **changes})
        for strategy in STRATEGIES
        for suffix, changes in ADAPTERS_WITH.items()
    },
}
BF16, CHECKPOINTING = {"train.precision": "bf16"}, {"train.activation_checkpointing": "full"}
AUTOCAST, BF16_SUMS = {"train.precision": "bf16-autocast"}, {"train.gradient_accumulation_dtype": "bf16"}
SELECTIVE = {"train.activation_checkpointing": "selective"}
ONLINE: dict[str, Any] = {"features.cache": "off"}
TOWER_TRAINED: dict[str, Any] = {"model.freeze": [], "features.cache": "off"}
RECOMPUTED: dict[str, Any] = {"train.tower_activation_checkpointing": True}
PROJECTOR: dict[str, Any] = {"model.freeze": ["tower", "language_model"]}
IN_HOST: dict[str, Any] = CHECKPOINTING | {"train.activation_offloading": True}
ADAPTERS: dict[str, Any] = {"model.lora": {"rank": 8}}
NF4: dict[str, Any] = {"model.lora": {"rank": 8, "quantize_base": "nf4"}}
IN_8_BITS: dict[str, Any] = {  # rows of a multiple of 256 numbers
    "train.optimizer.name": "adamw_8bit",
    "model.language_model.config.hidden_size": 256,
    "model.language_model.config.intermediate_size": 512,
}
CASES |= {
    **{
        f"{strategy} autocast{suffix}": Case(strategy, AUTOCAST | changes)
        for strategy in ("ddp", "zero1", "zero2", "zero3")
        for suffix, changes in {"": {}, " adapters": ADAPTERS}.items()
    },
    **{
        f"fsdp {name} bf16 frozen sharded": Case("fsdp", changes | BF16 | {"train.shard_frozen_weights": True})
        for name, changes in {"adapters": ADAPTERS, "projector only": PROJECTOR}.items()
    },
    "zero2 bf16 sums": Case("zero2", BF16 | BF16_SUMS),
    "zero2 bf16 reduced": Case("zero2", BF16 | {"train.reduce_dtype": "bf16"}),
    "zero2 bf16 checkpointing": Case("zero2", BF16 | CHECKPOINTING),
    "zero1": Case("zero1"),
    "zero1 bf16": Case("zero1", BF16),
    "zero1 one pass": Case("zero1", passes=1),
    "zero1 checkpointing": Case("zero1", CHECKPOINTING),
    "zero1 online": Case("zero1", ONLINE, cached=False),
    "zero1 tower trained": Case("zero1", TOWER_TRAINED, cached=False),
    "zero1 projector only": Case("zero1", PROJECTOR),
    "zero1 adapters": Case("zero1", ADAPTERS),
    "zero1 adapters bf16": Case("zero1", ADAPTERS | BF16),
    "zero3": Case("zero3"),
    "zero3 bf16 one pass": Case("zero3", BF16, passes=1),
    "zero3 checkpointing": Case("zero3", CHECKPOINTING),
    "zero3 online": Case("zero3", ONLINE, cached=False),
    "zero3 tower trained": Case("zero3", TOWER_TRAINED, cached=False),
    "zero3 projector only": Case("zero3", PROJECTOR),
    "zero3 adapters": Case("zero3", ADAPTERS),
    "zero3 adapters bf16": Case("zero3", ADAPTERS | BF16),
    "zero3 projector only bf16": Case("zero3", PROJECTOR | BF16),
}
# A vocabulary whose logits are what a step holds most of, were they there at once.
LARGE_VOCABULARY = 6000
IN_CHUNKS, AT_ONCE = {"train.loss_chunk_tokens": 20}, {"train.loss_chunk_tokens": 0}
CASES |= {
    **{f"{strategy} loss in chunks": Case(strategy, IN_CHUNKS, vocabulary=LARGE_VOCABULARY) for strategy in STRATEGIES},
    **{f"{strategy} selective": Case(strategy, SELECTIVE) for strategy in (*STRATEGIES, "zero1", "zero3")},
    **{f"{strategy} bf16 selective": Case(strategy, SELECTIVE | BF16) for strategy in ("fsdp", "zero3")},
    "zero3 adapters selective": Case("zero3", SELECTIVE | ADAPTERS),
    "ddp loss at once": Case("ddp", AT_ONCE, vocabulary=LARGE_VOCABULARY),
    "fsdp loss at once": Case("fsdp", AT_ONCE, vocabulary=LARGE_VOCABULARY),
    "ddp bf16 loss in chunks": Case("ddp", IN_CHUNKS | BF16, vocabulary=LARGE_VOCABULARY),
    "fsdp bf16 loss in chunks": Case("fsdp", IN_CHUNKS | BF16, vocabulary=LARGE_VOCABULARY),
    "fsdp bf16 loss in chunks one pass": Case("fsdp", IN_CHUNKS | BF16, passes=1, vocabulary=LARGE_VOCABULARY),
    "fsdp bf16 loss at once": Case("fsdp", AT_ONCE | BF16, vocabulary=LARGE_VOCABULARY),
    "fsdp checkpointing loss in chunks": Case("fsdp", IN_CHUNKS | CHECKPOINTING, vocabulary=LARGE_VOCABULARY),
    "zero1 bf16 loss in chunks": Case("zero1", IN_CHUNKS | BF16, vocabulary=LARGE_VOCABULARY),
    "zero2 loss at once": Case("zero2", AT_ONCE, vocabulary=LARGE_VOCABULARY),
    "zero2 bf16 loss at once": Case("zero2", AT_ONCE | BF16, vocabulary=LARGE_VOCABULARY),
    "zero2 bf16 loss in chunks": Case("zero2", IN_CHUNKS | BF16, vocabulary=LARGE_VOCABULARY),
    "zero3 loss in chunks": Case("zero3", IN_CHUNKS, vocabulary=LARGE_VOCABULARY),
    "zero3 loss at once": Case("zero3", AT_ONCE, vocabulary=LARGE_VOCABULARY),
    "zero3 bf16 loss in chunks": Case("zero3", IN_CHUNKS | BF16, vocabulary=LARGE_VOCABULARY),
}
# Without a GPU both memories are one place: all of it is compared with what both are said to hold.
CASES |= {
    "zero1 offload": Case("zero1", {"train.offload": "optimizer"}),
    "zero2 offload": Case("zero2", {"train.offload": "optimizer"}),
    "zero3 offload": Case("zero3", {"train.offload": "optimizer+weights"}),
    **{
        f"{strategy} activations offloaded": Case(strategy, IN_HOST)
        for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3")
    },
    "ddp bf16 activations offloaded": Case("ddp", IN_HOST | BF16),
    "fsdp adapters activations offloaded": Case("fsdp", IN_HOST | ADAPTERS),
    **{f"{strategy} nf4": Case(strategy, NF4) for strategy in ("ddp", "fsdp")},
    "fsdp nf4 bf16 selective": Case("fsdp", NF4 | BF16 | SELECTIVE),
    "fsdp nf4 bf16 frozen sharded": Case("fsdp", NF4 | BF16 | {"train.shard_frozen_weights": True}),
    "ddp nf4 autocast checkpointing": Case("ddp", NF4 | AUTOCAST | CHECKPOINTING),
    "ddp adapters autocast checkpointing": Case("ddp", ADAPTERS | AUTOCAST | CHECKPOINTING),
    "fsdp 8-bit": Case("fsdp", IN_8_BITS),
    "fsdp 8-bit bf16 checkpointing": Case("fsdp", IN_8_BITS | BF16 | CHECKPOINTING),
    "fsdp 8-bit adapters": Case("fsdp", IN_8_BITS | {"model.lora": {"rank": 16}}),
    "zero2 overlap": Case("zero2", own_zero(overlap_comm=True)),
    "fsdp gathered once": Case("fsdp", {"train.reshard_after_forward": "never"}),
    "fsdp gathered once bf16 checkpointing": Case(
        "fsdp", {"train.reshard_after_forward": "never"} | BF16 | CHECKPOINTING
    ),
    "fsdp two layers ahead": Case("fsdp", {"train.prefetch_layers": 2}),
    "fsdp two layers ahead bf16": Case("fsdp", {"train.prefetch_layers": 2} | BF16),
    "zero2 own bucket": Case("zero2", own_zero(reduce_bucket_size=3_000_000)),
    "zero2 gradients in place": Case("zero2", own_zero(contiguous_gradients=False)),
    "zero3 own bucket": Case("zero3", own_zero(reduce_bucket_size=3_000_000)),
    "zero3 gradients in place": Case("zero3", own_zero(contiguous_gradients=False)),
    "zero3 all live": Case("zero3", own_zero(stage3_max_live_parameters=10**9)),
    "zero3 none ahead": Case("zero3", own_zero(stage3_prefetch_bucket_size=0)),
    "zero3 all ahead": Case("zero3", own_zero(stage3_prefetch_bucket_size=10**8, stage3_max_live_parameters=10**9)),
    "zero3 persistent": Case("zero3", own_zero(stage3_param_persistence_threshold=20_000)),
    "ddp averaged": Case("ddp", AVERAGED),
    "fsdp averaged": Case("fsdp", AVERAGED),
    "zero2 averaged": Case("zero2", AVERAGED),
    "zero3 averaged": Case("zero3", AVERAGED),
    "fsdp offload": Case("fsdp", {"train.offload": "optimizer+weights"}),
    "zero3 offload optimizer": Case("zero3", {"train.offload": "optimizer"}),
    "zero3 adapters offload": Case("zero3", ADAPTERS | {"train.offload": "optimizer+weights"}),
    "zero2 adapters offload": Case("zero2", ADAPTERS | {"train.offload": "optimizer"}),
    "fsdp adapters offload": Case("fsdp", ADAPTERS | {"train.offload": "optimizer+weights"}),
    "zero1 adapters offload": Case("zero1", ADAPTERS | {"train.offload": "optimizer"}),
    "zero2 bf16 offload": Case("zero2", BF16 | BF16_SUMS | {"train.offload": "optimizer"}),
    "zero1 bf16 offload": Case("zero1", BF16 | BF16_SUMS | {"train.offload": "optimizer"}),
    "zero3 bf16 offload": Case("zero3", BF16 | {"train.offload": "optimizer+weights"}),
    "fsdp bf16 offload": Case("fsdp", BF16 | {"train.offload": "optimizer+weights"}),
}
CONTEXT: dict[str, Any] = {"train.context_parallel": 2}
CASES |= {
    "ddp context parallel": Case("ddp", CONTEXT),
    "ddp context parallel bf16 selective": Case(
        "ddp", CONTEXT | BF16 | {"train.activation_checkpointing": "selective"}
    ),
    "fsdp context parallel tower trained": Case("fsdp", CONTEXT | TOWER_TRAINED, cached=False),
    "fsdp context parallel bf16 loss in chunks": Case(
        "fsdp", CONTEXT | BF16 | IN_CHUNKS | CHECKPOINTING, vocabulary=LARGE_VOCABULARY
    ),
    "fsdp context parallel adapters": Case("fsdp", CONTEXT | ADAPTERS),
    "zero2 context parallel bf16": Case("zero2", CONTEXT | BF16),
    "zero3 context parallel": Case("zero3", CONTEXT),
    "qwen2_5_vl ddp context parallel online": Case("ddp", CONTEXT | ONLINE, cached=False, family="qwen2_5_vl"),
    "qwen3_vl fsdp context parallel bf16": Case("fsdp", CONTEXT | BF16 | ONLINE, cached=False, family="qwen3_vl"),
    "qwen3_vl ddp context parallel tower trained": Case(
        "ddp", CONTEXT | TOWER_TRAINED, cached=False, family="qwen3_vl"
    ),
}
# What patterns choose: whole layers and halves of others, only what is last, and a tower in part.
IN_FRONT: dict[str, Any] = {
    "model.freeze_parameters": [
        "*.embed_tokens.*",
        "*language_model.layers.0.*",
        "*language_model.layers.1.self_attn.*",
        "*language_model.layers.3.mlp.up_proj.*",
    ]
}
AT_THE_END: dict[str, Any] = {
    "model.freeze": ["tower", "projector", "language_model"],
    "model.train_parameters": ["*language_model.layers.3.*", "*language_model.layers.2.mlp.*", "lm_head.*"],
}
THAWED: dict[str, Any] = {"model.train_parameters": ["*vision_tower*layer_norm*", "*vision_tower*layers.1.*"], **ONLINE}
IN_ALL_PARTS: dict[str, Any] = {"model.lora": {"rank": 8, "parts": list(PARTS)}, **TOWER_TRAINED}
DORA: dict[str, Any] = {"model.lora": {"rank": 8, "use_dora": True}}
CASES |= {
    f"{strategy} {name}": replace(case, strategy=strategy)
    for strategy in ("ddp", "fsdp", "zero2", "zero3")
    for name, case in {
        "frozen in front": Case("", IN_FRONT),
        "frozen in front bf16": Case("", IN_FRONT | BF16),
        "trained at the end": Case("", AT_THE_END),
        "thawed in part": Case("", THAWED, cached=False),
        "adapters in all parts": Case("", IN_ALL_PARTS, cached=False),
        "adapters in all parts bf16": Case("", IN_ALL_PARTS | BF16, cached=False),
    }.items()
}
CASES |= {f"{strategy} dora bf16": Case(strategy, DORA | BF16) for strategy in STRATEGIES}
CASES["ddp trained at the end checkpointing"] = Case("ddp", AT_THE_END | CHECKPOINTING)
# Native models, whose images are as large as they may be here.
NATIVE_CASES = {
    f"{family} {name}": replace(case, family=family)
    for family in ("qwen2_5_vl", "qwen3_vl")
    for name, case in {
        "ddp": Case("ddp"),
        "ddp bf16 online": Case("ddp", ONLINE | BF16, cached=False),
        "ddp tower trained": Case("ddp", TOWER_TRAINED, cached=False),
        "fsdp online": Case("fsdp", ONLINE, cached=False),
        "fsdp bf16 checkpointing": Case("fsdp", BF16 | CHECKPOINTING),
        "fsdp tower trained": Case("fsdp", TOWER_TRAINED, cached=False),
        "fsdp tower recomputed": Case("fsdp", TOWER_TRAINED | RECOMPUTED, cached=False),
        "zero2 online": Case("zero2", ONLINE, cached=False),
        "zero2 bf16 checkpointing": Case("zero2", BF16 | CHECKPOINTING),
        "zero3": Case("zero3"),
        "zero3 bf16 online": Case("zero3", BF16 | ONLINE, cached=False),
        "zero3 tower trained": Case("zero3", TOWER_TRAINED, cached=False),
        "ddp adapters": Case("ddp", ADAPTERS),
        "zero2 projector only bf16": Case("zero2", PROJECTOR | BF16),
    }.items()
}
CASES |= NATIVE_CASES
