"""FLOPs of family hf as a plan counts them, against torch's own counter on a real step, and against widths."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.hf.kinds import INSTALLED, KINDS
from tests.support.hf.publish import model_section, publish
from tests.support.short_form import WHOLE, chosen
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.hf.family import HfFamily
from vlmpipe.trainer.sizing.flops import flops_per_sequence
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape, inputs_of

TYPES = chosen({name: kind for name, kind in INSTALLED.items() if name != "paligemma"}, lambda name: name == "internvl")
FREEZE = {"frozen": ("tower",), **({"trained": ()} if WHOLE else {})}
NEAR = 0.03
TOKENS = 640
IMAGES = {"lighton_ocr": 1, "mistral3": 1}  # these compute attention between all images of a sequence; else 4
FAR_BACKWARD = {"qwen3_5": 0.15}  # torch's own linear attention, in place of a kernel, repeats products there
NOT_BY_WIDTHS = ("qwen3_vl_moe", "qwen3_5")  # experts, linear attention


@pytest.mark.parametrize("freeze", FREEZE.values(), ids=FREEZE)
@pytest.mark.parametrize("model_type", TYPES)
def test_a_step_computes_what_is_counted_before_it(model_type: str, freeze: tuple[str, ...], tmp_path: Path) -> None:
    """With images of the largest size in one long sample."""
    config = ModelConfig.model_validate(model_section(publish(model_type, tmp_path / "model"), freeze=freeze))
    family, number_of_images = HfFamily(), IMAGES.get(model_type, 4)
    images, shape = family.images(config), SequenceShape(1, TOKENS, number_of_images, TOKENS // 4)
    model = family.build(config, images.processor.tokenizer)
    model.set_experts_implementation("eager")  # torch counts no grouped product
    module = family.training_module(config, model, cached=False).train()
    inputs = inputs_of(config, shape, len(images.processor.tokenizer), cached=False, sequence_samples=1)
    inputs["input_ids"].zero_()
    for number in range(number_of_images):  # with a text token before each: some models tell images apart by that
        start = number * (images.max_tokens + 1) + 1
        inputs["input_ids"][0, start : start + images.max_tokens] = images.image_token_id
    inputs["images"] = images.tensors([Image.new("RGB", images.largest)] * number_of_images)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(**inputs).backward()
    found = flops_per_sequence(
        family.shape(config),
        sequence_length=TOKENS,
        images=number_of_images,
        label_tokens=len(inputs["label_ids"]),
        cached=False,
        activation_checkpointing="none",
    )
    assert found.total == pytest.approx(counter.get_total_flops(), rel=FAR_BACKWARD.get(model_type, NEAR))


@pytest.mark.parametrize("model_type", [name for name in TYPES if not KINDS[name].needs_torchvision])
def test_widths_tell_the_same_of_plain_layers_and_not_of_others(model_type: str, tmp_path: Path) -> None:
    config = ModelConfig.model_validate(model_section(publish(model_type, tmp_path / "model")))
    counted = HfFamily().shape(config)
    assert counted.counted
    given, by_widths = (
        flops_per_sequence(
            shape, sequence_length=128, images=1, label_tokens=1, cached=False, activation_checkpointing="none"
        )
        for shape in (counted, dataclasses.replace(counted, counted=None))
    )
    found, expected = ((one.language_layers + one.attention).forward for one in (given, by_widths))
    assert (found == pytest.approx(expected, rel=NEAR)) == (model_type not in NOT_BY_WIDTHS)
