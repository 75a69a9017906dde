"""More vectors than are compared exactly are searched by an index, which finds nearly what an exact search finds."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from vlmpipe.trainer.audit.images import search as module
from vlmpipe.trainer.audit.images.neighbours import as_directions, nearest
from vlmpipe.trainer.audit.images.search import EXTRA, INDEX_PACKAGE, max_compared, nearly_nearest, search
from vlmpipe.trainer.errors import missing_packages

VECTORS, COPIES, COUNT = 1200, 60, 6


@pytest.fixture(scope="module")
def vectors() -> NDArray[np.float32]:
    """Vectors of some dimensions, the last of which are near the first; one is zero."""
    draw = np.random.default_rng(3)
    drawn = draw.standard_normal((VECTORS, 12)) @ draw.standard_normal((12, 64))
    drawn[-COPIES:] = drawn[:COPIES] + 0.05 * draw.standard_normal((COPIES, 64))
    directions = as_directions(drawn)
    directions[500] = 0
    return directions


def test_the_index_finds_the_copies_and_nearly_all_of_the_nearest(
    vectors: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(INDEX_PACKAGE, reason=f"the extra {EXTRA} is not installed")
    monkeypatch.setattr(module, "AT_ONCE", VECTORS - 1)  # the last block has a single row
    found, exact = nearly_nearest(vectors, COUNT), nearest(vectors, COUNT)
    assert (found.rows[:COPIES, 0] == np.arange(VECTORS - COPIES, VECTORS)).all()
    assert found.rows[-1, 0] == COPIES - 1
    assert (found.rows[500] == -1).all() and not (found.rows == 500).any()
    assert not (found.rows == np.arange(VECTORS)[:, None]).any()
    others = np.delete(np.arange(VECTORS), 500)
    shared = [len(np.intersect1d(found.rows[row], exact.rows[row])) for row in others.tolist()]
    assert np.mean(shared) > 0.98 * COUNT
    np.testing.assert_allclose(found.cosines[others, 0], exact.cosines[others, 0], atol=0.01)
    assert (nearly_nearest(vectors, COUNT).rows == found.rows).all()
    few = nearly_nearest(vectors[:3], COUNT)
    assert sorted(few.rows[0].tolist()) == [-1, -1, -1, -1, 1, 2]


def test_the_index_is_taken_beyond_the_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = as_directions(np.random.default_rng(0).standard_normal((20, 4)))
    called: list[int] = []
    monkeypatch.setattr(module, "nearly_nearest", lambda some, count: called.append(len(some)))
    monkeypatch.setattr(module, "has_index", lambda: True)
    monkeypatch.setattr(module, "MAX_EXACT", 10)
    search(vectors[:10], 3)
    assert not called
    search(vectors, 3)
    assert called == [20] and max_compared() == module.MAX_INDEXED


def test_without_the_package_the_limit_is_that_of_the_exact_search_and_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == INDEX_PACKAGE]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, INDEX_PACKAGE, None)
    assert max_compared() == module.MAX_EXACT
    with pytest.raises(ImportError, match=rf"vlmpipe\[{EXTRA}\]"), missing_packages():
        nearly_nearest(np.eye(3, dtype=np.float32), 1)
