"""What a selection keeps of what the answer is about, and how much the question decides."""

import pytest
import torch

from vlmpipe.trainer.features.relevance.allocation import Kept, quadtree, tokens_at
from vlmpipe.trainer.features.relevance.selected_tokens import Selected, sensitivity, summarised, target_kept, tokens_in

GRID = (6, 6)


def selected(*tokens: int) -> Selected:
    return Selected([tokens_at(torch.tensor(tokens), GRID)], [[0.0] * 36], [1.0])


def test_tokens_of_a_region_are_those_that_it_covers() -> None:
    assert tokens_in((1 / 6, 0, 2 / 6, 1 / 6), GRID) == {(0, 1)}
    assert tokens_in((0, 0, 0.5, 0.34), GRID) == {(row, column) for row in (0, 1) for column in (0, 1, 2)}


def test_a_target_is_kept_by_tokens_of_its_own() -> None:
    region = (1 / 6, 0, 2 / 6, 1 / 6)
    assert target_kept(selected(1, 20), region) == 1
    assert target_kept(selected(2, 20), region) == 0
    assert target_kept(selected(1), ()) is None
    coarse = Selected([quadtree(torch.zeros(36), GRID, 4)], [[0.0] * 36], [1.0])
    assert target_kept(coarse, region) == 0, "a mean of many tokens is not the token"


def test_sensitivity_is_one_minus_the_overlap() -> None:
    assert sensitivity(selected(1, 2), selected(1, 2)) == 0
    assert sensitivity(selected(1, 2), selected(3, 4)) == 1
    assert sensitivity(selected(1, 2, 3), selected(2, 3, 4)) == pytest.approx(0.5)


def test_a_summary_has_means_over_images_and_questions() -> None:
    line = {"tokens": 4, "all_tokens": 36, "images": 1, "sensitivity": 0.5, "target_kept": 1.0,
            "target_kept_untrained": 0.0, "balance": [0.25, 0.75]}  # fmt: skip
    without_image = {"tokens": 0, "all_tokens": 0, "images": 0, "sensitivity": 0.0, "target_kept": None,
                     "target_kept_untrained": None, "balance": []}  # fmt: skip
    found = summarised([line, without_image, line | {"tokens": 2, "target_kept": None}], 0.9)
    assert found["mean_image_tokens"] == 3 and found["all_image_tokens"] == 36
    assert found["exact_match_per_token"] == pytest.approx(0.3)
    assert found["target_kept"] == 1 and found["target_kept_untrained"] == 0 and found["balance"] == [0.25, 0.75]


def test_kept_knows_its_grid() -> None:
    assert Kept(torch.tensor([[0, 1, 1, 1]]), GRID).index.tolist() == [1]
