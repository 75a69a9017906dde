"""The family hf: each model type trains in packed sequences as plain transformers would on one sample at a time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.trainer.hf_models import KINDS, model_section, publish
from tests.support.trainer.native_models import SIZES, picture
from trainer.config.data import DataConfig
from trainer.config.model import IMAGE_TOKEN, ModelConfig
from trainer.data.chat.encode import Chat
from trainer.data.chat.make import make_chat
from trainer.data.sample import Turn
from trainer.models.attention.cu_seqlens import CuSeqlens
from trainer.models.hf.processor import PublishedImages
from trainer.models.image_processor import image_preparer
from trainer.models.image_tokens import image_form_of, sample_image_tokens
from trainer.models.registry import family_of

SAMPLES = ([(1, SIZES[2]), (2, SIZES[1])], [], [(3, SIZES[3])], [(4, SIZES[4])])  # pictures by seed and size
RELATIVE = 1e-5


def ids_of(chat: Chat, config: ModelConfig, sizes: list[tuple[int, int]]) -> list[int]:
    turns = [Turn(f"{IMAGE_TOKEN}\n" * len(sizes) + "what is this?", "it is seven")]
    return chat.encode(turns, sample_image_tokens(config)(sizes), sizes).input_ids


@pytest.mark.parametrize("model_type", KINDS)
def test_a_packed_sequence_equals_its_samples_in_plain_transformers(model_type: str, tmp_path: Path) -> None:
    """Loss and gradients of every token; without an image, every trained part still has a gradient."""
    config = ModelConfig.model_validate(model_section(publish(model_type, tmp_path), freeze=()))
    family, published = family_of(config), image_form_of(config).published
    assert published is not None
    chat = make_chat(config, DataConfig(source="x", sequence_length=8), ())
    model = family.build(config, chat.tokenizer)
    ids = [ids_of(chat, config, [size for _, size in sample]) for sample in SAMPLES]
    total = 0.0
    for sample, tokens in zip(SAMPLES, ids, strict=True):
        total += plain_loss(model, published, tokens, [picture(*one) for one in sample])
    expected = gradients_of(model)
    module = family.training_module(config, model, cached=False).train()
    row = torch.tensor([[token for sample in ids for token in sample]])
    positions = torch.cat([torch.arange(len(sample)) for sample in ids])[None]
    lengths = [len(sample) for sample in ids]
    ends = torch.tensor(lengths).cumsum(0) - 1
    index = torch.tensor([place for place in range(row.shape[1]) if place not in ends])
    images = image_preparer(config)([picture(*one) for sample in SAMPLES for one in sample], list(map(len, SAMPLES)))
    bounds = CuSeqlens.of([lengths], row.shape[1])
    loss = module(row, positions, index, row[0, index + 1], images.values, samples=bounds)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(total, rel=RELATIVE)
    found = gradients_of(model)
    largest = max(float(each.abs().max()) for each in expected.values())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=RELATIVE, atol=RELATIVE * largest, msg=name)
    module(row[:, : lengths[1]], positions[:, : lengths[1]], index[:1], row[0, index[:1] + 1], {}).backward()
    assert gradients_of(model).keys() == expected.keys()


def plain_loss(model: Any, published: PublishedImages, tokens: list[int], images: Sequence[bytes]) -> float:
    """Summed loss of one sample by the library alone, and its gradients."""
    ids = torch.tensor([tokens])
    pictures = [Image.open(io.BytesIO(image)) for image in images]
    given = published.tensors(pictures) if pictures else {}
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **published.types(ids), **given).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
    loss.backward()
    return float(loss.detach())


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Taken from the model, which is left without any."""
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
