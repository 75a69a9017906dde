"""The size of an export against the weights of the model itself."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.trainer.flop_cases import CASES, model_config
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.export_size import FP32_BYTES, MAX_SHARD_BYTES, export_size

GB = 10**9


@pytest.mark.parametrize("case", ["nothing frozen", "siglip and qwen2 with grouped queries", "adapters"])
def test_bytes_are_those_of_the_models_weights(case: str) -> None:
    config = model_config(**CASES[case])
    model = family_of(config).skeleton(config, vocabulary=300)
    shape = family_of(config).shape(config)
    size = export_size(shape, config, "fp32")
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    adapters = sum(weight.numel() for name, weight in model.named_parameters() if "lora_" in name)
    whole = sum(weight.numel() for weight in model.parameters()) - adapters
    assert size.read_bytes == FP32_BYTES * trained
    assert size.written_bytes == pytest.approx(FP32_BYTES * whole, rel=0.02)
    assert size.disk_bytes == size.written_bytes, "less than one exported file"
    assert 2 * export_size(shape, config, "bf16").written_bytes == size.written_bytes
    assert size.base_bytes == pytest.approx(2 * 2 * (whole - trained + adapters), rel=0.1), "bf16, read twice"


def test_a_model_of_7b_needs_the_disk_of_one_file() -> None:
    tiny = family_of(config := model_config()).shape(model_config())
    parameters = dict.fromkeys(tiny.parameters, 0) | {
        "tower": 303_507_456, "projector": 20_979_712, "embedding": 131_072_000, "language_layers": 6_476_271_616,
        "head": 131_072_000,
    }  # fmt: skip
    language = dataclasses.replace(tiny.language, hidden=4096, intermediate=11_008)
    shape = dataclasses.replace(tiny, parameters=parameters, frozen=frozenset({"tower"}), language=language)
    size = export_size(shape, config, "fp32")
    assert size.read_bytes == 4 * 6_759_395_328
    assert size.disk_bytes == MAX_SHARD_BYTES
    assert size.memory_bytes < 4 * GB
