"""Weights of a Qwen2.5 language model: Hugging Face's names and shapes, and Megatron-core's shards."""

from __future__ import annotations

from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
LANGUAGE, HEAD = "model.language_model.", "lm_head.weight"
# Megatron-core's name: Hugging Face's, and the dimension that is split (None: every process has it whole).
_OUTSIDE = {
    "embedding.word_embeddings.weight": (f"{LANGUAGE}embed_tokens.weight", 0),
    "decoder.final_layernorm.weight": (f"{LANGUAGE}norm.weight", None),
    "output_layer.weight": (HEAD, 0),
}
_IN_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
}
QKV, GATE_UP = "self_attention.linear_qkv", "mlp.linear_fc1.weight"


def _plain_names(text: Any, tied: bool) -> dict[str, tuple[str, int | None]]:
    names = {name: value for name, value in _OUTSIDE.items() if not (tied and value[0] == HEAD)}
    for layer in range(text.num_hidden_layers):
        for name, (theirs, split) in _IN_LAYER.items():
            names[f"decoder.layers.{layer}.{name}"] = (f"{LANGUAGE}layers.{layer}.{theirs}", split)
    return names


def shard(whole: Tensors, text: Any, tied: bool, count: int, rank: int) -> Tensors:
    """The tensors of tensor-parallel process `rank` of `count`, by Megatron-core's names.

    `whole` has Hugging Face's names; `text` is the language model's config. Heads of queries, keys and values lie side
    by side by group, and each process has the gate above its part of the up projection.
    """
    mine = {}
    for name, (theirs, split) in _plain_names(text, tied).items():
        mine[name] = whole[theirs] if split is None else whole[theirs].chunk(count, split)[rank]
    groups = text.num_key_value_heads
    for layer in range(text.num_hidden_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"{LANGUAGE}layers.{layer}."
        for kind in ("weight", "bias"):
            parts = [whole[f"{theirs}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            by_group = torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1)
            mine[f"{ours}{QKV}.{kind}"] = by_group.chunk(count)[rank].flatten(0, 1)
        halves = [whole[f"{theirs}mlp.{half}_proj.weight"].chunk(count)[rank] for half in ("gate", "up")]
        mine[ours + GATE_UP] = torch.cat(halves)
    return {name: tensor.contiguous() for name, tensor in mine.items()}


def join(shards: list[Tensors], text: Any, tied: bool) -> Tensors:
    """What `shard` was given, from the tensors of all processes in the order of their ranks."""
    whole = {}
    for name, (theirs, split) in _plain_names(text, tied).items():
        parts = [one[name] for one in shards]
        whole[theirs] = parts[0] if split is None else torch.cat(parts, split)
    groups = text.num_key_value_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sizes = [text.num_attention_heads // groups * head, head, head]
    for layer in range(text.num_hidden_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"{LANGUAGE}layers.{layer}."
        for kind in ("weight", "bias"):
            by_group = torch.cat([one[f"{ours}{QKV}.{kind}"] for one in shards]).unflatten(0, (groups, -1))
            for part, tensor in zip("qkv", by_group.split(sizes, 1), strict=True):
                whole[f"{theirs}self_attn.{part}_proj.{kind}"] = tensor.flatten(0, 1)
        halves = zip(*(one[ours + GATE_UP].chunk(2) for one in shards), strict=True)
        for half, parts in zip(("gate", "up"), halves, strict=True):
            whole[f"{theirs}mlp.{half}_proj.weight"] = torch.cat(parts)
    return {name: tensor.contiguous() for name, tensor in whole.items()}
