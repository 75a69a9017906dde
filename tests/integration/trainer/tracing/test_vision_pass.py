"""What a plan says of images on their way through encoder and projector, against what a real step holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.support.hf.kinds import INSTALLED
from tests.support.hf.publish import model_section, publish
from tests.support.short_form import chosen
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.hf.family import HfFamily
from vlmpipe.trainer.models.layers.recompute_policy import Recompute
from vlmpipe.trainer.sizing.trace_results import Compute
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape, inputs_of
from vlmpipe.trainer.tracing.step import trace_module, trace_step

TYPES = chosen(INSTALLED, lambda name: name in ("internvl", "glm4v_moe"))
NOT_TRACED = ("paligemma",)  # not trained
NEAR = 0.1  # of the real peak
TOKENS = 640


FREEZE: dict[str, tuple[str, ...]] = {"trained": (), "frozen": ("tower",)}
CASES = {f"{name}-{how}": (name, FREEZE[how]) for name in TYPES if name not in NOT_TRACED for how in FREEZE}
TRIED = chosen(CASES, lambda name: name in ("internvl-trained", "glm4v_moe-frozen"))


@pytest.mark.parametrize(("model_type", "freeze"), TRIED.values(), ids=TRIED)
def test_a_traced_step_holds_what_a_real_one_does(model_type: str, freeze: tuple[str, ...], tmp_path: Path) -> None:
    """With images of the largest size in it."""
    require_near(model_type, freeze, "fp32", tmp_path)


def test_experts_are_traced_in_the_type_that_they_compute_in(tmp_path: Path) -> None:
    """Under autocast, torch multiplies by experts of fp32 in fp32."""
    require_near("qwen3_vl_moe", ("tower",), "autocast", tmp_path)


def require_near(model_type: str, freeze: tuple[str, ...], compute: Compute, tmp_path: Path) -> None:
    config = ModelConfig.model_validate(model_section(publish(model_type, tmp_path / "model"), freeze=freeze))
    family = HfFamily()
    images = family.images(config)
    shape = SequenceShape(1, TOKENS, 4, TOKENS // 4)
    tokens, layers = len(images.processor.tokenizer), family.shape(config).language.layers
    planned = trace_step(
        config, shape, vocabulary=tokens, cached=False, compute=compute, recompute=Recompute(), language_layers=layers
    )
    model = family.build(config, images.processor.tokenizer)
    module = family.training_module(config, model, cached=False).train()
    inputs = inputs_of(config, shape, tokens, cached=False)
    inputs["input_ids"].zero_()
    for number in range(shape.images):  # with a text token before each: some models tell images apart by that
        start = number * (images.max_tokens + 1) + 1
        inputs["input_ids"][0, start : start + images.max_tokens] = images.image_token_id
    shown = images.tensors([Image.new("RGB", images.largest)] * shape.images)
    real = trace_module(module, inputs | {"images": shown}, compute)
    for moment in ("forward", "turn", "backward"):
        expected, found = (getattr(each, moment).total_bytes for each in (real, planned))
        assert found == pytest.approx(expected, rel=NEAR), moment
    assert planned.input_bytes >= sum(tensor.nbytes for tensor in shown.values() if torch.is_floating_point(tensor))
