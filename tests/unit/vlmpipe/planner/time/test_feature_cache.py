"""Whether a feature cache pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner.configs import A100_80, LLAVA_7B, RoundPrices, run_config
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.time.feature_cache import CacheAdvice, advise, feature_bytes
from vlmpipe.planner.time.step_time import sequence_flops
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.sizing.model_shape import ModelShape, Stack

# so400m/384 + Qwen3-0.6B with 81 pooled tokens, and SigLIP-B/224 + SmolLM2-135M.
SO400M = Stack(27, 1152, 16, 16, 72, 4304, False, 15_230_000)
SIGLIP_B = Stack(12, 768, 12, 12, 64, 3072, False, 7_087_872)
SMALL_LM = replace(
    LLAVA_7B,
    tower=SO400M,
    tower_tokens=729,
    image_tokens=81,
    feature_width=1152,
    language=Stack(28, 1024, 16, 8, 128, 3072, True, 15_730_000),
    vocabulary=151_936,
)


def advised(
    shape: ModelShape = SMALL_LM, prices: RoundPrices | None = None, *, cpu: bool = False, **run: Any
) -> CacheAdvice:
    settings: dict[str, Any] = {
        "features__cache": "auto",
        "data__max_images_per_sequence": 64,
        "plan__sample_tokens": 200,
        "plan__sample_images": 1,
        "plan__samples": 558_000,
        "train__activation_checkpointing": "none",
        "train__strategy": "ddp",
    }
    if cpu:
        settings |= {"cluster__accelerator_type": "", "cluster__accelerator_count": 0}
    config = run_config(**settings | run)
    load = Workload.assumed(config, shape)
    return advise(config, shape, layout_of(config), load, None if cpu else A100_80, prices or RoundPrices())


def test_bytes_of_an_image_are_tokens_times_width_in_bf16() -> None:
    assert feature_bytes(LLAVA_7B) == 576 * 1024 * 2  # 1.18 MB: CLIP-L/336
    assert feature_bytes(SMALL_LM) == 81 * 1152 * 2  # 0.19 MB: so400m after pooling


def test_speedup_is_the_towers_share_of_a_sequence() -> None:
    config = run_config(train__activation_checkpointing="none")
    row = sequence_flops(config, LLAVA_7B, Workload.assumed(config, LLAVA_7B), cached=False)
    others = row.total - row.tower.total
    advice = advised(
        LLAVA_7B,
        plan__sample_tokens=740,
        plan__sample_images=0.94,
        data__max_images_per_sequence=7,
        plan__efficiency=0.5,
    )
    assert advice.speedup == pytest.approx((row.tower.forward + others) / others)
    assert 1.01 <= advice.speedup <= 1.02  # CLIP-L with a 7B model: not for speed


def test_a_small_language_model_is_more_than_twice_as_fast_from_the_cache() -> None:
    advice = advised(plan__sample_tokens=131, plan__efficiency=0.5)  # 81 of the image, 50 of text
    assert advice.speedup == pytest.approx(2.53, rel=0.02)  # so400m/384 with Qwen3-0.6B, samples attend by themselves


def test_a_frozen_language_model_gains_more() -> None:
    frozen = replace(SMALL_LM, frozen=frozenset({"tower", "embedding", "language_layers", "head"}))
    whole, part = advised().speedup, advised(frozen).speedup
    assert whole is not None and part is not None and part > whole


def test_auto_chooses_what_pays() -> None:
    many, one = advised(train__epochs=40), advised(train__epochs=1)
    assert (many.state, many.pays) == ("on", True)
    assert (one.state, one.pays) == ("off", False)
    assert many.saved_gpu_hours is not None and many.encode_gpu_hours is not None
    assert many.saved_gpu_hours > many.encode_gpu_hours


def test_on_and_off_stay_and_the_numbers_are_reported() -> None:
    assert (lambda advice: (advice.state, advice.pays))(advised(train__epochs=1, features__cache="on")) == ("on", False)
    assert (lambda advice: (advice.state, advice.pays))(advised(train__epochs=40, features__cache="off")) == (
        "off",
        True,
    )


def test_a_trained_tower_cannot_be_cached() -> None:
    advice = advised(replace(SMALL_LM, frozen=frozenset()))
    assert (advice.state, advice.pays) == ("off", None)
    assert "tower is trained" in advice.why


def test_bytes_and_storage_of_all_images() -> None:
    advice = advised()
    assert advice.bytes == pytest.approx(558_000 * 81 * 1152 * 2, rel=1e-4)
    assert advice.usd_per_month == pytest.approx(advice.bytes / 2**30 * 0.02)


def test_expensive_storage_can_make_a_cache_not_pay() -> None:
    assert advised(train__epochs=40).pays
    assert not advised(prices=RoundPrices(store=200), train__epochs=40).pays


def test_without_a_price_gpu_time_alone_decides() -> None:
    advice = advised(prices=RoundPrices(unknown=frozenset({"a2-ultragpu-8g"})), train__epochs=40)
    assert advice.pays and "storage is not weighed" in advice.why


def test_an_unknown_number_of_images_is_decided_per_image() -> None:
    known, unknown = advised(train__epochs=40), advised(train__epochs=40, plan__samples=0)
    assert unknown.pays == known.pays
    assert unknown.bytes is None and unknown.usd_per_month is None and unknown.encode_gpu_hours is None
    assert unknown.bytes_per_image == known.bytes_per_image


def test_max_steps_ends_the_saving_early() -> None:
    assert advised(train__epochs=40).pays
    assert not advised(train__epochs=40, train__max_steps=100).pays


def test_a_measured_efficiency_changes_no_decision_by_flops() -> None:
    """Both sides of the balance are computing, so the efficiency falls out but for the write and the storage."""
    slow, fast = (advised(plan__efficiency=share, train__epochs=40) for share in (0.2, 0.6))
    assert slow.pays == fast.pays and slow.speedup == pytest.approx(fast.speedup)


@pytest.mark.parametrize(("epochs", "state"), [(1, "off"), (5, "on")])
def test_on_cpus_the_towers_passes_decide(epochs: int, state: str) -> None:
    assert advised(cpu=True, train__epochs=epochs).state == state


def test_sequences_without_images_need_no_cache() -> None:
    advice = advised(plan__sample_images=0)
    assert (advice.state, advice.bytes) == ("off", 0)


@pytest.mark.parametrize("epochs", [1, 40, 400])
def test_a_large_store_states_its_size_price_and_break_even(epochs: int) -> None:
    """Ten million images of CLIP-L/336: 11.8 TB."""
    one = {"plan__samples": 10_000_000, "plan__sample_tokens": 740, "plan__sample_images": 1, "train__epochs": epochs}
    advice = advised(LLAVA_7B, **one)
    assert advice.bytes == pytest.approx(10_000_000 * 576 * 1024 * 2, rel=1e-5)
    assert advice.usd_per_month == pytest.approx(219.7, abs=0.1)
    assert "features of 10 million images are 11.8 TB and cost $220 a month" in advice.why
    assert advice.break_even_epochs is not None and advice.break_even_months is not None
    assert advice.pays == (epochs > advice.break_even_epochs) == (advice.break_even_months > 1)
    assert f"cheaper below {advice.break_even_epochs:,.3g} epochs" in advice.why
    months = f"stored for more than {advice.break_even_months:,.3g} months"
    assert (months if advice.break_even_months else "run's epochs always") in advice.why


def test_a_break_even_is_where_both_cost_the_same() -> None:
    advice = advised(LLAVA_7B, plan__samples=10_000_000, plan__sample_images=1)
    below, above = (
        advised(LLAVA_7B, plan__samples=10_000_000, plan__sample_images=1, train__epochs=epochs)
        for epochs in (int(advice.break_even_epochs or 0), int(advice.break_even_epochs or 0) + 1)
    )
    assert (below.pays, above.pays) == (False, True)
    assert "TB" not in advised().why and advised().break_even_epochs
