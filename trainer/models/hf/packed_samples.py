"""Keeps packed samples apart in the language model of any type, in a hook before its forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.varlen import block_diagonal_mask, same_sample

# Inputs of a language model that each pipeline stage has, and those of levels that are added in the first stage.
IN_ALL_STAGES = ("inputs_embeds", "position_ids", "attention_mask", "visual_pos_masks")


@dataclass
class PackedSamples:
    """Samples of the sequences in the forward pass, for hooks of the language model.

    Views of pipeline stages share it. positions: None outside of a forward pass. masks: empty ones in place of the
    library's. layers: of the first of several pipeline stages; 0 in a whole model. why_masked: see `HfVLM.masked`.
    """

    positions: Tensor | None = None
    samples: CuSeqlens | None = None
    masks: dict[str, Tensor] | None = None
    layers: int = 0
    why_masked: str = ""


def separate_samples(packed: PackedSamples) -> object:
    """A hook of the language model, inert outside of `HfVLM.hidden_states`.

    Where the library has made masks, since image tokens see each other, samples are taken out of each other's sight;
    elsewhere attention gets the samples' bounds.
    """

    def hook(
        language_model: PreTrainedModel, args: object, inputs: dict[str, object]
    ) -> tuple[object, dict[str, object]] | None:
        positions, samples = packed.positions, packed.samples
        if positions is None:
            return None
        if packed.layers:
            _require_later_stages_know(inputs, packed.layers)
        mask = inputs.get("attention_mask")
        if mask is not None and mask is packed.masks:
            return args, inputs | {"samples": samples}
        if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim > 2):
            packed.why_masked = packed.why_masked or "the library makes masks, since tokens of an image see each other"
            seen = same_sample(positions)
            masks = mask if isinstance(mask, dict) else {"": mask}
            apart = {name: _both(mask, seen) for name, mask in masks.items()}
            return args, inputs | {"attention_mask": apart if isinstance(mask, dict) else apart[""]}
        return args, inputs | block_diagonal_mask(language_model.config, positions, samples)

    return hook


def _require_later_stages_know(inputs: Mapping[str, object], layers: int) -> None:
    """Raise ConfigError for inputs of a language model in a first pipeline stage that layers of later ones need too."""
    levels = inputs.get("deepstack_visual_embeds")
    mask = inputs.get("attention_mask")
    others = ["attention_mask"] if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim > 2) else []
    others += [name for name, value in inputs.items() if name not in IN_ALL_STAGES and isinstance(value, Tensor)]
    if others or (isinstance(levels, list) and len(levels) > layers):
        raise ConfigError(
            f"the language model's layers take {others[0] if others else 'deepstack_visual_embeds'} from its inputs, "
            "and later pipeline stages get hidden states alone",
            fix="use another strategy, such as fsdp",
        )


def _both(mask: Tensor | None, seen: Tensor) -> Tensor:
    if mask is None:  # plainly causal
        return seen.tril()
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
