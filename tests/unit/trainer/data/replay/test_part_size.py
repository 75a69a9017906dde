"""Files of questions for the start model: few of them, and enough for all ranks."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from vlmpipe.trainer.data.replay.part_size import MAX_ROWS, MIN_ROWS, busiest_rank, part_rows


def files_of(questions: int) -> list[int]:
    """Sizes of the files that are written one after the other."""
    sizes = list[int]()
    written = 0
    while written < questions:
        sizes.append(min(part_rows(written), questions - written))
        written += sizes[-1]
    return sizes


@example(200_001, 2)
@given(st.integers(1, 300_000), st.integers(1, 64))
def test_no_rank_has_more_questions_than_the_plan_says(questions: int, ranks: int) -> None:
    files = files_of(questions)
    most = max(sum(files[rank::ranks]) for rank in range(ranks))
    assert most <= busiest_rank(questions, ranks) <= min(questions, math.ceil(questions / ranks) + MAX_ROWS)


def test_few_questions_occupy_several_ranks_and_many_have_few_files() -> None:
    assert len(files_of(330)) == 6 and max(files_of(330)) == MIN_ROWS
    assert busiest_rank(330, 8) == MIN_ROWS
    assert len(files_of(1_000_000)) < 1_000_000 / MAX_ROWS + 1000
