"""How many questions a step holds where samples share prefixes, in plan and check."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file
from vlmpipe.planner.prepared_workload import questions_note
from vlmpipe.planner.step_questions import StepQuestions, step_questions
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.data.prefixes.groups import PrefixGroups
from vlmpipe.trainer.data.sampler import PackedBatchSampler

PREFIX, BRANCH, QUESTIONS = 80, 20, 8


class Split(SimpleNamespace):
    """A `SplitIndex` of 100 images with 8 questions each."""

    def __init__(self) -> None:
        samples = 100 * QUESTIONS
        super().__init__(
            name="train",
            tokens=np.full(samples, PREFIX + BRANCH, np.int32),
            label_tokens=np.full(samples, 4, np.int32),
            image_count=np.ones(samples, np.int32),
            image_tokens=np.full(samples, 64, np.int32),
            shard_numbers=np.zeros(samples, np.int32),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def shown(self) -> Any:
        return self.image_count

    def prefix_groups(self, max_branches: int) -> PrefixGroups:
        prefix_tokens = np.full(len(self), PREFIX, np.int32)
        return PrefixGroups(np.arange(len(self), dtype=np.int32) // QUESTIONS, prefix_tokens, max_branches)


def step_of(*overrides: str, sequences: int = 32) -> StepQuestions | None:
    fixed = ("data.sequence_length=512", "train.micro_batch_size=1", f"train.global_batch_size={sequences}")
    config = load_run_file(ROOT / "configs/easy-vqa.yaml", [*fixed, *overrides])
    job = JobConfig.model_validate(config.to_run_json(RunPaths(run_id="run", root_uri="/runs")))
    split: Any = Split()
    epoch = PackedBatchSampler.of_training(split, job).totals(0)
    return step_questions(config, job, split, epoch)


def test_the_offered_size_keeps_the_questions_of_a_step() -> None:
    """Five samples of 100 tokens fill a sequence by themselves; two images with 8 questions each do when shared."""
    shared = step_of("data.share_prefix=on")
    assert shared and shared.separate == pytest.approx(32 * 5, rel=0.01)
    assert shared.questions == pytest.approx(32 * 16, rel=0.05)
    assert shared.label_tokens == pytest.approx(4 * shared.questions)
    offered = step_of("data.share_prefix=on", sequences=shared.global_batch_size)
    assert offered and offered.questions == pytest.approx(shared.separate, rel=0.1)
    assert f"train.global_batch_size={shared.global_batch_size} holds 160." in shared.text(32)


def test_pairs_are_called_so() -> None:
    text = StepQuestions(questions=60, separate=32, label_tokens=99, global_batch_size=17, unit="pairs").text(32)
    assert "holds 60 pairs with 99 label tokens, 32 pairs without it. train.global_batch_size=17 holds 32." in text


def test_without_shared_prefixes_nothing_is_said() -> None:
    assert step_of() is None


def test_the_smallest_size_is_what_the_ranks_take() -> None:
    few = step_of("data.share_prefix=on", sequences=2)
    assert few and few.global_batch_size == 2 and "fewer sequences do not divide among the ranks" in few.text(2)


def test_of_little_sharing_no_reason_is_made_up() -> None:
    """33 questions for 32: of ranks that take 4 sequences at a time, 28 would divide."""
    text = StepQuestions(questions=33, separate=32, label_tokens=66, global_batch_size=32).text(32)
    assert text.endswith("33 questions with 66 label tokens, 32 questions without it.")


def test_before_preparation_the_number_is_not_known() -> None:
    config = load_run_file(ROOT / "configs/easy-vqa.yaml", ["data.share_prefix=on"])
    load: Any = SimpleNamespace(step_questions=None)
    model: Any = None
    assert "is known once the data is prepared" in questions_note(config, model, load)


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (None, "10 questions about an image then take 1.6 times as long with 16 image tokens, 7.9 with 576"),
        (3.14, "the data's samples are 3.1 times as many tokens as with each image once."),
        (1.0, "nearly no two samples of the data have the same images."),
    ],
)
def test_auto_says_why_it_is_off_and_what_that_costs(cost: float | None, said: str) -> None:
    config = load_run_file(ROOT / "configs/easy-vqa.yaml", ["data.share_prefix=auto", "data.pack=false"])
    load: Any = SimpleNamespace(step_questions=None, separate_cost=cost)
    model: Any = None
    found = questions_note(config, model, load)
    assert cost or "pairs with 256 image tokens" in questions_note(
        config.model_copy(
            update={"train": config.train.model_copy(update={"objective": "dpo", "validate_every_steps": 0})}
        ),
        model,
        load,
    )
    reason = "data.pack false, which gives each sample its own sequence"
    assert found.startswith(f"data.share_prefix auto computes images for each sample: found {reason}; {said}")
