"""The nearest vectors by blocks are those of the whole product."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.audit.images import neighbours
from vlmpipe.trainer.audit.images.neighbours import as_directions, nearest


@given(rows=st.integers(0, 23), count=st.integers(1, 6), seed=st.integers(0, 99))
def test_blocks_find_what_the_whole_product_has(rows: int, count: int, seed: int) -> None:
    vectors = as_directions(np.random.default_rng(seed).standard_normal((rows, 5))) if rows else np.zeros((0, 5), "f")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "BLOCK_ROWS", 4)
        patch.setattr(neighbours, "COLUMN_ROWS", 7)
        found = nearest(vectors, count)
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    expected = -np.sort(-cosines, axis=1)[:, : max(0, min(count, rows - 1))]
    np.testing.assert_allclose(found.cosines, expected, atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(cosines, found.rows, axis=1), found.cosines, atol=1e-6)
    for row, others in enumerate(found.rows.tolist()):
        assert row not in others and len(set(others)) == len(others)


def test_each_pair_is_named_once() -> None:
    vectors = as_directions(np.array([[1.0, 0.1], [1.0, 0.0], [-1.0, 0.0]]))
    assert nearest(vectors, 2).pairs().tolist() == [[0, 1], [0, 2], [1, 2]]
    assert nearest(vectors[:1], 2).pairs().shape == (0, 2)
