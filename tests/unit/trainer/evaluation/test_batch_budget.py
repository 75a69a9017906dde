"""The bounds of a batch of answers, and what an out-of-memory does to them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.evaluation.questions_at_once import questions_at_once

sizes = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 9)), max_size=40)


@given(sizes, st.integers(1, 2000), st.integers(1, 20))
def test_batches_hold_every_question_once_within_the_bounds(
    questions: list[tuple[int, int]], max_tokens: int, max_images: int
) -> None:
    tokens, images = [one for one, _ in questions], [one for _, one in questions]
    batches = BatchBudget(max_tokens, max_images).batches(tokens, images)
    assert [n for one in batches for n in range(len(tokens))[one]] == list(range(len(tokens)))
    for one in batches:
        count = one.stop - one.start
        assert count == 1 or (max(tokens[one]) * count <= max_tokens and sum(images[one]) <= max_images)


@given(sizes, st.integers(500, 2000))
def test_out_of_memory_halves_the_batch_and_loses_no_answer(questions: list[tuple[int, int]], room: int) -> None:
    tokens, images = [one for one, _ in questions], [one for _, one in questions]

    def answer(batch: slice) -> list[int]:
        if max(tokens[batch]) * (batch.stop - batch.start) > room:
            raise torch.OutOfMemoryError
        return list(range(len(tokens))[batch])

    budget = BatchBudget(10**6, 10**6)
    assert budget.answered(tokens, images, answer) == list(range(len(tokens)))
    first = max(tokens, default=0) * len(tokens)
    assert bool(budget.out_of_memory) == (first > room)


def test_one_question_that_does_not_fit_is_an_error_and_the_note_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    def answer(batch: slice) -> list[int]:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        BatchBudget(1000).answered([100, 100], [1, 1], answer)
    assert "out of memory with 200 tokens of questions at once: 100 from here on" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "images", "expected"), [(600, 1, 54), (60_000, 1, 1), (10, 0, 64), (100, 8, 8), (10**6, 200, 1)]
)
def test_the_plan_counts_questions_as_the_evaluation_does(tokens: int, images: int, expected: int) -> None:
    count = questions_at_once(64, 32_768, tokens, images)
    assert count == expected
    (first, *_) = BatchBudget(32_768).batches([tokens] * 64, [images] * 64)
    assert first.stop == count
