"""Stored features of an encoder with mergers inside: their inputs, which the mergers turn into the encoder's output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tests.support.trainer.tiny_native import CONFIGS
from vlmpipe.trainer.models.hf.encoder import encoder_of, layers_of, mergers_of, without_mergers
from vlmpipe.trainer.models.hf.encoder_output import StoredEncoder, encoder_output, find_before_mergers

GRIDS = ((4, 6), (2, 4))  # of the images, in patches; the last one stands for a blank one too


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    made = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**CONFIGS["qwen3_vl"])).float().eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made.requires_grad_(False)


def images_of(model: Any) -> list[dict[str, Tensor]]:
    numbers = encoder_of(model).patch_embed.proj.weight[0].numel()
    return [
        {"pixel_values": torch.randn(rows * columns, numbers), "image_grid_thw": torch.tensor([[1, rows, columns]])}
        for rows, columns in GRIDS
    ]


def test_mergers_of_all_levels_give_the_encoders_output_back(model: Any) -> None:
    images, encoder = images_of(model), encoder_of(model)
    found = find_before_mergers(model, images, images[-1])
    side = int(encoder.config.spatial_merge_size)
    assert encoder_of(model) is encoder and found is not None
    assert found.patches == side**2 and len(found.fields) == len(mergers_of(encoder)) > 1
    assert found.width == len(found.fields) * side**2 * int(encoder.config.hidden_size)
    expected = encoder(images[0]["pixel_values"], grid_thw=images[0]["image_grid_thw"])
    model.set_encoder(without_mergers(encoder, found.patches), modality="image")
    rows = found.take(encoder_output(model, images[0]))
    stand_in = StoredEncoder(encoder, found)
    stand_in.rows = rows
    output = stand_in()
    assert torch.equal(output.pooler_output, expected.pooler_output)
    assert all(map(torch.equal, output.deepstack_features, expected.deepstack_features))
    names = {name for name, _ in encoder.named_parameters() if "merger" in name}
    assert {name for name, _ in stand_in.named_parameters()} == names, "names of checkpoints"
    assert layers_of(stand_in) == [], "mergers are no layers of the encoder"


def test_a_merger_that_mixes_tokens_has_no_stored_inputs(model: Any) -> None:
    merger = encoder_of(model).merger
    merger.register_forward_hook(lambda _module, _inputs, output: output + output.mean(0))
    images = images_of(model)
    assert find_before_mergers(model, images, images[-1]) is None
