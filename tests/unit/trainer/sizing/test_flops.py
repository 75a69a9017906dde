"""FLOPs by formula against torch's own counter on real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.short_form import chosen
from tests.support.trainer.flop_cases import CACHEABLE, CASES, by_formula, counted, model_config
from vlmpipe.trainer.models.llava.family import LlavaFamily
from vlmpipe.trainer.sizing.flops import flops_per_sequence, model_flops_per_sequence, tower_flops_per_image

TOLERANCE = 0.02


# What is computed again depends on the layers and on what is trained, and not on the rest of a model. What is cached is
# that there is no tower: of the models whose towers are read in the same way, the short form has one.
# What a trained part costs is the same beside other parts: each way to freeze one is counted once.
LEFT_OUT = (
    "clip with its class token", "only the language model", "adapters on two layers", "adapters, nothing else",
    "norms of the tower", "qwen2.5-vl, only the projector", "qwen3-vl, adapters",
)  # fmt: skip
COUNTED = chosen(
    {
        f"{case}, {'cached' if cached else 'online'}, {checkpointing}": (case, cached, checkpointing)
        for case, cached in [*((name, False) for name in CASES), *CACHEABLE]
        for checkpointing in ("none", "selective", "full")
    },
    lambda name: (
        (name.endswith("online, none") and not name.startswith(LEFT_OUT))
        or name.startswith(("qwen2.5-vl, cached, none", "the head alone, cached, none"))
        or name.startswith(("siglip and qwen2", "nothing frozen, online", "adapters, online"))
    ),
)


@pytest.mark.parametrize(("case", "cached", "checkpointing"), COUNTED.values(), ids=COUNTED)
def test_formula_agrees_with_torchs_counter(case: str, cached: bool, checkpointing: Any) -> None:
    config = model_config(**CASES[case])
    found, truth = (take(config, cached=cached, checkpointing=checkpointing) for take in (by_formula, counted))
    assert found == pytest.approx(truth, rel=TOLERANCE)


def test_attention_is_part_of_what_torch_counts() -> None:
    """Were it not, the comparison above would prove nothing about attention."""
    query = torch.rand(1, 4, 64, 16)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert counter.get_total_flops() == 4 * 64 * 64 * 4 * 16


def test_caching_saves_exactly_the_tower() -> None:
    shape = LlavaFamily().shape(model_config())
    sizes: dict[str, Any] = {
        "sequence_length": 100,
        "images": 5,
        "label_tokens": 10,
        "activation_checkpointing": "none",
    }
    online, cached = (flops_per_sequence(shape, **sizes, cached=value) for value in (False, True))
    assert online.total - cached.total == 5 * tower_flops_per_image(shape) > 0


@pytest.mark.parametrize("freeze", [(), ("tower",)])
def test_a_trained_tower_that_is_recomputed_runs_its_layers_once_more(freeze: tuple[str, ...]) -> None:
    shape = LlavaFamily().shape(model_config(freeze=freeze))
    sizes: dict[str, Any] = {"sequence_length": 100, "images": 5, "label_tokens": 10, "cached": False}
    kept, again = (
        flops_per_sequence(shape, **sizes, activation_checkpointing="none", recomputes_tower=value).tower
        for value in (False, True)
    )
    patches = 5 * 2 * shape.tower_tokens * shape.patch_pixels * shape.tower.hidden
    assert again.recompute == (0 if freeze else pytest.approx(kept.forward - patches, abs=5))
    assert (again.forward, again.backward) == (kept.forward, kept.backward) and not kept.recompute


def test_model_flops_count_neither_padding_nor_other_samples_nor_recomputation() -> None:
    shape = LlavaFamily().shape(model_config())
    alone = flops_per_sequence(
        shape, sequence_length=40, images=1, label_tokens=5, cached=False, activation_checkpointing="none"
    ).total
    packed = model_flops_per_sequence(shape, useful_tokens=120, samples=3, images=3, label_tokens=15, cached=False)
    computed = flops_per_sequence(
        shape, sequence_length=160, images=3, label_tokens=15, cached=False, activation_checkpointing="full"
    ).total
    assert packed == pytest.approx(3 * alone)
    assert packed < computed


def test_a_row_is_counted_in_whole_numbers() -> None:
    shape = LlavaFamily().shape(model_config())
    row = flops_per_sequence(
        shape, sequence_length=100, images=2, label_tokens=10, cached=False, activation_checkpointing="full"
    )
    assert all(isinstance(number, int) for _, part in row.parts() for number in (part.forward, part.backward))
