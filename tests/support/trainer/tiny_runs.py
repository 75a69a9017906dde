"""A tiny model and its run file, on which real steps take milliseconds. Tests train it too."""

from __future__ import annotations

import copy
import json
from typing import Any

from vlmpipe.trainer.config.strategies import PIPELINE_PARALLEL, TENSOR_PARALLEL

TINY: dict[str, Any] = {
    "version": 1,
    "name": "tiny",
    "model": {
        "tower": {
            "config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "patch_size": 8,
                "vision_use_head": False,
            }
        },
        "language_model": {
            "config": {
                "model_type": "qwen2",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 512,
            }
        },
        "tokenizer": "train:300",
        "image_size": 32,
    },
    "data": {"source": "builtin:digits", "max_samples": 60, "sequence_length": 256, "shard_samples": 20},
    "features": {"cache": "on", "shard_images": 16},
    "train": {
        "strategy": "ddp",
        "epochs": 3,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        # With AdamW's usual eps, 1e-8, updates of elements with next to no gradient are rounding errors in their full
        # size: they grow a thousandfold within the four steps of some run.
        "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.01, "eps": 1e-5},
        "lr_schedule": "constant",
        "warmup_fraction": 0.0,
        "clip_grad_norm": 0.5,
        "precision": "fp32",
        "loss_chunk_tokens": 8,  # so few that a micro-batch has several chunks
        "log_every_steps": 1,
        "checkpoint_every_steps": 1000,
        "deterministic": True,
    },
    "evaluate": {"max_new_tokens": 4, "batch_questions": 16},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with dotted keys replaced: {"train.strategy": "fsdp"}."""
    result = json.loads(json.dumps(base))
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        section = result
        for part in path:
            section = section.setdefault(part, {})
        section[last] = copy.deepcopy(value)  # later keys may lead into it
    return result


def strategy_changes(strategy: str) -> dict[str, Any]:
    """What a run file needs for a strategy: two ranks to a copy of the model where it is split."""
    changes: dict[str, Any] = {"train.strategy": strategy}
    if strategy in TENSOR_PARALLEL:
        changes["train.tensor_parallel"] = 2
    if strategy in PIPELINE_PARALLEL:
        changes["train.pipeline_parallel"] = 2
    return changes
