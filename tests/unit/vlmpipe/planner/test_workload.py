"""The workload: samples, sequences and images of an epoch."""

from __future__ import annotations

import pytest

from tests.support.planner.configs import LLAVA_7B, run_config
from vlmpipe.planner.workload import Workload


def test_load_from_the_plan_section() -> None:
    load = Workload.assumed(run_config(plan__sample_tokens=1000, plan__samples=8192, train__epochs=2), LLAVA_7B)
    assert load.sequences_per_epoch == 2041  # 8192 samples of 1000 tokens in rows of 0.98 x 4096
    assert load.steps == 2 * 32
    assert load.images_per_sequence == pytest.approx(0.94 * 0.98 * 4.096)
    assert load.label_tokens_per_sequence == pytest.approx(
        load.useful_tokens_per_sequence - 576 * load.images_per_sequence
    )
    assert load.passes == 2


def test_a_sequences_image_budget_bounds_its_samples() -> None:
    load = Workload.assumed(
        run_config(plan__sample_tokens=580, plan__sample_images=1, data__max_images_per_sequence=4), LLAVA_7B
    )
    assert load.images_per_sequence == 4
    assert load.fill == pytest.approx(4 * 580 / 4096)


def test_an_unknown_load_is_the_most_a_sequence_can_hold() -> None:
    load = Workload.assumed(run_config(plan__sample_tokens=0), LLAVA_7B)
    assert load.images_per_sequence == 7 and load.steps is None and load.sequences_per_epoch is None
    assert "not known" in load.origin


def test_max_steps_and_max_samples_bound_the_load() -> None:
    few = Workload.assumed(run_config(data__max_samples=1000), LLAVA_7B)
    assert few.samples == 1000
    short = Workload.assumed(run_config(train__max_steps=5, train__epochs=3), LLAVA_7B)
    assert short.steps == 5 and 0 < short.passes < 1


def test_assumed_token_pairs_are_those_of_equal_samples_or_else_the_most() -> None:
    known = Workload.assumed(run_config(plan__sample_tokens=256, plan__sample_images=0.5), LLAVA_7B)
    assert known.samples_per_sequence > 1
    sample_tokens = known.useful_tokens_per_sequence / known.samples_per_sequence
    assert known.sample_pairs_per_sequence == pytest.approx(known.samples_per_sequence * sample_tokens**2)
    unknown = Workload.assumed(run_config(plan__sample_tokens=0), LLAVA_7B)
    assert unknown.sample_pairs_per_sequence == pytest.approx(unknown.useful_tokens_per_sequence**2)


def test_load_from_prepared_data() -> None:
    load = Workload.from_index(
        run_config(),
        samples=300,
        tokens=200 * 2048,
        pairs=500_000_000,
        images=150,
        image_tokens=1500,
        label_tokens=4000,
        sequences=200,
        steps=4,
    )
    assert (load.fill, load.samples_per_sequence, load.images_per_sequence) == (0.5, 1.5, 0.75)
    assert (load.label_tokens_per_sequence, load.steps, load.images_per_epoch) == (20, 4, 150)
    assert load.sample_pairs_per_sequence == 2_500_000
