"""Gives a model's `generate` its videos apart from its images, as the library's processor does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vlmpipe.trainer.models.hf.encoder import encoder_of, patches_of_a_token
from vlmpipe.trainer.models.hf.grids import precomputed
from vlmpipe.trainer.sizing.image_grids import VideoSize


def with_videos(
    model: nn.Module, inputs: dict[str, object], projected: Tensor, sizes: Sequence[tuple[int, int]]
) -> dict[str, object]:
    """Return the inputs of `HfFamily.generation_inputs` with videos as such.

    projected: (tokens, levels x hidden) of all images and videos. sizes: of each; of videos a VideoSize.
    """
    if not any(isinstance(size, VideoSize) for size in sizes):
        return inputs
    encoder, input_ids, grids = encoder_of(model), inputs["input_ids"], inputs["image_grid_thw"]
    types = inputs["mm_token_type_ids"]
    assert isinstance(input_ids, Tensor) and isinstance(grids, Tensor) and isinstance(types, Tensor)
    tokens = (grids.prod(-1) // patches_of_a_token(encoder)).tolist()
    features = projected.split(tokens)
    outputs: dict[str, object] = {}
    prepared: dict[str, object] = {
        "input_ids": input_ids,
        "mm_token_type_ids": types + 2 * (input_ids == model.config.video_token_id).int(),
        "mm_encoder_outputs": outputs,
    }
    for kind in ("image", "video"):
        chosen = [number for number, size in enumerate(sizes) if isinstance(size, VideoSize) == (kind == "video")]
        if chosen:
            outputs[kind] = precomputed(torch.cat([features[number] for number in chosen]), encoder)
            prepared[f"{kind}_grid_thw"] = grids[chosen]
    if hasattr(encoder.config, "tokens_per_second"):
        prepared["second_per_grid_ts"] = torch.tensor([size.patch_s for size in sizes if isinstance(size, VideoSize)])
    return prepared
