"""What a plan of an evaluation counts for questions about the same images."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.paths import ROOT
from tests.support.trainer.tiny_native import model_section
from vlmpipe.catalog.machines import Gpu
from vlmpipe.config.run_config import load_run_file
from vlmpipe.planner.jobs.hours import evaluate_hours
from vlmpipe.planner.jobs.nodes import nodes_of
from vlmpipe.planner.jobs.shared_prompts import MeanPrompt, mean_prompt, questions_per_image
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.prepared_workload import planned_workload
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.sizing.flops import flops_per_sequence

TOKENS, IMAGE = 100.0, 64


def case_of(controls: str) -> Scenario:
    given = (f"evaluate.controls={controls}", "evaluate.max_samples=0", "gate=none")
    config = load_run_file(ROOT / "configs/llava-7b.yaml", given)
    model = architecture(config)
    load, _ = planned_workload(config, model, RunPaths(run_id="r1", root_uri="root"))
    nodes = nodes_of(config, "train", None)
    assert nodes.machine and isinstance(nodes.device, Gpu)
    return Scenario(config, load.sized(model.shape), layout_of(config), load, nodes.machine, nodes.device)


class Split(SimpleNamespace):
    """A `SplitIndex` of samples with these images, a letter each."""

    def __init__(self, *samples: str) -> None:
        counts, names = np.array([len(images) for images in samples], np.int32), np.array(list("".join(samples)))
        super().__init__(has_videos=False, image_count=counts, images=lambda: names)

    def __len__(self) -> int:
        return len(self.image_count)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(("a", "a", "a", "b"), 2), (("ab", "ab", "ba", "a"), 4 / 3), (("", "a", "a", ""), 4 / 3), (("a", "b"), 1)],
)
def test_questions_about_the_same_images_in_the_same_order_are_counted(samples: Any, expected: float) -> None:
    split: Any = Split(*samples)
    model = ModelConfig.model_validate(model_section("qwen3_vl"))
    assert questions_per_image(split, model) == pytest.approx(expected)
    model = ModelConfig.model_validate(
        model_section("qwen3_vl", relevance={"max_tokens": 4})
    )  # a selection takes image tokens by the question
    assert questions_per_image(split, model) == 1


def load_of(together: float) -> Workload:
    made: Any = SimpleNamespace(sample_tokens=TOKENS, sample_images=1.0, image_tokens=None, asked_together=together)
    return made


def test_the_mean_prompt_is_the_groups_tokens_over_its_questions() -> None:
    prompt = mean_prompt(load_of(4), IMAGE, 1.0, at_once=64)
    assert prompt.tokens == pytest.approx((IMAGE + 4 * (TOKENS - IMAGE)) / 4)
    assert prompt.images == pytest.approx(1 / 4)
    assert prompt.pairs == pytest.approx((IMAGE**2 + 4 * (TOKENS**2 - IMAGE**2)) / 4)
    assert mean_prompt(load_of(4), IMAGE, 1.0, at_once=2).images == pytest.approx(1 / 2)


def test_little_or_nothing_shared_counts_whole() -> None:
    whole = MeanPrompt(TOKENS, 1.0, TOKENS**2)
    assert mean_prompt(load_of(1), IMAGE, 1.0, at_once=64) == whole
    assert mean_prompt(load_of(10), IMAGE, 0.1, at_once=64) == whole, "every tenth question is about another image"
    assert mean_prompt(load_of(10), 16, 1.0, at_once=64) == whole, "answered alone, see prompt_groups"


def test_an_evaluation_takes_the_time_of_what_is_computed() -> None:
    """What is spared is in proportion to the FLOPs; the images of a control with shuffled ones are shown once each."""
    case, shuffled = case_of("[no_image]"), case_of("[no_image, shuffled_image]")

    def spared(scenario: Scenario, together: float) -> float:
        found = [
            evaluate_hours(replace(scenario, load=replace(scenario.load, asked_together=n)), asks=False)
            for n in (1.0, together)
        ]
        assert found[0] and found[1] and found[1] < found[0]
        return found[0] - found[1]

    def flops(together: float) -> float:
        load = replace(case.load, asked_together=together)
        prompt = mean_prompt(load, case.shape.image_tokens, 1.0, 64)
        return flops_per_sequence(
            replace(case.shape, selections=1),
            sequence_length=prompt.tokens,
            images=prompt.images,
            label_tokens=0,
            cached=case.cached,
            activation_checkpointing="none",
            sample_pairs=prompt.pairs,
        ).forward

    expected = (flops(1) - flops(8)) / (flops(1) - flops(2))
    assert spared(case, 8) / spared(case, 2) == pytest.approx(expected, rel=1e-6) and expected > 1.5
    assert spared(shuffled, 8) == pytest.approx(spared(case, 8))
