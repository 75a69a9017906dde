"""Context parallelism (`train.context_parallel`): ranks of a group train on the same packed sequences and share their
tokens.

Each rank places images into the embeddings of all tokens, then continues with its own: the tower and these embeddings
are whole on each rank, the language model, its activations, head and loss are not. Attention exchanges tokens for heads
(`vlmpipe.trainer.models.attention.context_parallel`). A rank's gradients are those of its own tokens' loss, so the sum
over all ranks that strategies take anyway is the whole gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention.context_parallel import ContextParallel
from vlmpipe.trainer.models.attention.mixers import BY_SAMPLE
from vlmpipe.trainer.models.attention.varlen import takes_samples
from vlmpipe.trainer.models.registry import family_of

BY_TOKEN = ("inputs_embeds", "position_ids", "visual_pos_masks")  # inputs that are split


def require_context_parallel(config: ModelConfig, ranks: int) -> None:
    """Raise ConfigError for a model whose attention `ranks` ranks cannot share. Builds it on the meta device only."""
    family = family_of(config)
    shape = family.shape(config)
    heads = shape.language.heads
    if heads % ranks:
        able = [str(degree) for degree in range(1, heads + 1) if heads % degree == 0]
        raise ConfigError(
            f"train.context_parallel {ranks} does not divide the language model's {heads} attention heads",
            expected=f"one of {', '.join(able)}",
        )
    with torch.device("meta"):
        model = family.skeleton(config, vocabulary=shape.vocabulary)  # all layers, which may differ
    module = family.training_module(config, model, cached=False)
    language_model: nn.Module = module.language_model
    name = f"train.context_parallel {ranks}: {type(language_model).__name__}"
    if any(getattr(part, BY_SAMPLE, False) for part in language_model.modules()):
        raise ConfigError(
            f"{name} has layers that are no attention, whose sequences ranks do not share",
            fix="set train.context_parallel to 1",
        )
    if getattr(module, "sees_images", False):
        raise ConfigError(
            f"{name} has images whose tokens see each other", fix="set train.context_parallel to 1 or use another model"
        )
    if not takes_samples(language_model.config):
        raise ConfigError(
            f"{name} has attention that is not plainly causal in each layer, or has dropout",
            expected="a language model whose tokens attend to all tokens before them in their sample",
            fix="set train.context_parallel to 1; train.sequence_parallel with train.strategy tp saves memory too",
        )


def share_sequences(module: nn.Module, ranks: int, worker: ProcessContext) -> None:
    """Have a training module share its sequences between `ranks` neighbouring ranks. Collective."""
    shape = (worker.world_size // ranks, ranks)
    mesh = init_device_mesh(worker.device.type, shape, mesh_dim_names=("data", "context"))
    split_tokens(module, ContextParallel(ranks, mesh.get_local_rank("context"), mesh.get_group("context").group_name))


def split_tokens(module: nn.Module, context: ContextParallel) -> None:
    """Have the language model of a training module compute and return the tokens of one rank."""
    module.language_model.register_forward_pre_hook(
        lambda _module, args, inputs: (args, inputs | inputs_of_rank(inputs, context)), with_kwargs=True
    )


def inputs_of_rank(inputs: dict[str, Any], context: ContextParallel) -> dict[str, object]:
    """A language model's inputs that differ for the tokens of one rank.

    Raises ConfigError for an input by token that is not known, which each rank would need its own part of.
    """
    assert "samples" in inputs, "attention needs the bounds of samples: positions of one rank's tokens do not show them"
    hidden, positions = inputs["inputs_embeds"], inputs["position_ids"]
    sequences, tokens, width = hidden.shape
    for name, value in inputs.items():
        if name not in BY_TOKEN and isinstance(value, torch.Tensor) and value.shape[:2] == (sequences, tokens):
            raise ConfigError(
                f"the language model takes {name} for each token, and ranks that share sequences do not split it",
                fix="set train.context_parallel to 1",
            )
    local_tokens = sequences * tokens // context.ranks
    start = context.number * local_tokens
    # A copy, or the first layer would keep all tokens in memory.
    local_hidden = hidden.reshape(-1, width)[start : start + local_tokens].clone().view(sequences, -1, width)
    local_positions = positions.flatten(-2)[..., start : start + local_tokens].unflatten(-1, (sequences, -1))
    local_inputs = {"inputs_embeds": local_hidden, "position_ids": local_positions, "context": context}
    if inputs.get("deepstack_visual_embeds"):
        places, levels = inputs["visual_pos_masks"], inputs["deepstack_visual_embeds"]
        if places.dtype == torch.bool:
            is_image = places.flatten()
            before, end = (int(is_image[:token].sum()) for token in (start, start + local_tokens))
            local_inputs["visual_pos_masks"] = is_image[start : start + local_tokens].view(sequences, -1)
            local_inputs["deepstack_visual_embeds"] = [level[before:end] for level in levels]
            return local_inputs
        # The host does not know how many of them are this rank's: those of other tokens become zeros at one of its own.
        places = places - start
        is_local = ((places >= 0) & (places < local_tokens)).unsqueeze(1)
        local_inputs["visual_pos_masks"] = places.clamp(0, local_tokens - 1)
        local_inputs["deepstack_visual_embeds"] = [level * is_local for level in levels]
    return local_inputs
