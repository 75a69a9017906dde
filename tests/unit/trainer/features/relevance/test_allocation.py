"""Kept tokens of one image: how many, which, and as a pooling matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vlmpipe.trainer.config.arr_coc.relevance import RelevanceConfig
from vlmpipe.trainer.features.relevance.allocation import Kept, allocate, quadtree
from vlmpipe.trainer.features.relevance.balancer import Balance

ALLOCATIONS = ("full", "uniform", "random", "topk", "mass", "quadtree")
NEUTRAL = torch.tensor(0.5)


def kept_of(relevance: Tensor, grid: tuple[int, int], compress: float = 0.5, seed: int = 0, **settings: Any) -> Kept:
    config = RelevanceConfig.model_validate({"estimator": "none", **settings})
    return allocate(config, relevance, Balance(torch.ones(1), torch.tensor(compress), NEUTRAL, NEUTRAL), grid, seed)


@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 7),
    most=st.integers(4, 12),
    allocation=st.sampled_from(ALLOCATIONS),
    seed=st.integers(0, 99),
)
def test_kept_cells_are_a_row_stochastic_matrix_in_raster_order(
    rows: int, columns: int, most: int, allocation: str, seed: int
) -> None:
    relevance = torch.rand(rows * columns, generator=torch.Generator().manual_seed(seed))
    bound = {} if allocation == "full" else {"max_tokens": most}
    kept = kept_of(relevance, (rows, columns), allocation=allocation, **bound)
    matrix = kept.matrix()
    torch.testing.assert_close(matrix.sum(1), torch.ones(len(kept)))
    assert (matrix >= 0).all() and (matrix.sum(0) <= 1 + 1e-6).all(), "no token is in two kept cells"
    assert kept.index.tolist() == sorted(set(kept.index.tolist()))
    assert all(matrix[n, place] > 0 for n, place in enumerate(kept.index))
    assert len(kept) <= (rows * columns if allocation == "full" else min(most, rows * columns))
    if allocation in ("full", "quadtree"):
        torch.testing.assert_close((matrix > 0).sum(0), torch.ones(rows * columns, dtype=torch.int64))
    tokens = torch.rand(rows * columns, 3)
    torch.testing.assert_close(kept.pool(tokens), matrix @ tokens)


def test_topk_keeps_the_most_relevant() -> None:
    relevance = torch.tensor([0.1, 0.9, 0.3, 0.8, 0.2, 0.7])
    assert kept_of(relevance, (2, 3), max_tokens=3).index.tolist() == [1, 3, 5]


def test_uniform_is_evenly_spaced_and_random_depends_on_the_seed_only() -> None:
    relevance = torch.zeros(36)
    assert kept_of(relevance, (6, 6), allocation="uniform", max_tokens=4).index.tolist() == [4, 13, 22, 31]
    drawn = [kept_of(relevance, (6, 6), allocation="random", max_tokens=9, seed=n).index.tolist() for n in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(("share", "expected"), [(0.5, [2]), (0.7, [1, 2]), (1.0, [0, 1, 2, 3])])
def test_mass_keeps_the_fewest_that_hold_the_share(share: float, expected: list[int]) -> None:
    relevance = torch.log(torch.tensor([0.1, 0.25, 0.6, 0.05])) * 0.1  # a temperature of 0.1 makes these the shares
    assert kept_of(relevance, (2, 2), allocation="mass", mass=share, max_tokens=4).index.tolist() == expected


def test_mass_keeps_to_its_bounds() -> None:
    one_matters = torch.tensor([0.0, 9.0, 0.0, 0.0])
    assert len(kept_of(one_matters, (2, 2), allocation="mass", max_tokens=3, min_tokens=2)) == 2
    assert len(kept_of(torch.zeros(4), (2, 2), allocation="mass", mass=1.0, max_tokens=3)) == 3


def test_compress_chooses_between_the_budgets() -> None:
    relevance = torch.rand(36)
    found = [len(kept_of(relevance, (6, 6), share, max_tokens=16, min_tokens=4)) for share in (0.0, 0.5, 1.0)]
    assert found == [16, 10, 4]


def test_focus_makes_mass_keep_fewer() -> None:
    relevance, config = torch.linspace(0, 1, 36), RelevanceConfig(allocation="mass", max_tokens=36, temperature=0.3)
    found = [
        len(allocate(config, relevance, Balance(torch.ones(1), NEUTRAL, NEUTRAL, torch.tensor(focus)), (6, 6), 0))
        for focus in (0.1, 0.5, 0.9)
    ]
    assert found[0] > found[1] > found[2]


def test_the_quadtree_is_finest_where_relevance_is() -> None:
    relevance = torch.zeros(8, 8)
    relevance[6, 1] = 1
    kept = quadtree(relevance.flatten(), (8, 8), 10)
    sizes = {tuple(cell[:2]): cell[2] for cell in kept.cells.tolist()}
    assert sizes[(6, 1)] == 1 and sizes[(0, 4)] == 4 and len(kept) == 10


def test_a_larger_cell_has_the_position_of_its_middle() -> None:
    kept = Kept(torch.tensor([[0, 0, 4, 4], [0, 4, 1, 1]]), (4, 5))
    assert kept.places.tolist() == [[1, 1], [0, 4]]
