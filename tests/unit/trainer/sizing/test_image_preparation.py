"""CPU time of preparing images, and the threads that share it."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT
from tests.support.trainer.flop_cases import model_config
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.image_preparation import (
    LIBRARY_S,
    MAX_THREADS,
    PATCHES_S,
    SQUARE_S,
    THREAD_SHARE,
    max_threads_of,
    preparation_s,
    rank_preparation_s,
    threads_of,
)
from vlmpipe.trainer.sizing.model_shape import ModelShape


def shape_of(**changes: object) -> ModelShape:
    config = model_config(**changes)
    return family_of(config).shape(config)


@pytest.mark.parametrize("pixels", [1 << 18, 1 << 20])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_patches_take_time_by_the_pixels_of_the_image(family: str, pixels: int) -> None:
    shape = shape_of(family=family, max_pixels=pixels)
    assert preparation_s("grids", shape) == pytest.approx(PATCHES_S * pixels / 1e6, rel=0.01)


def test_images_of_the_librarys_processors_take_time_by_their_pixels_and_squares_by_the_photo() -> None:
    tiles = shape_of(family="smolvlm_tiles")
    assert preparation_s("published", tiles) == pytest.approx(LIBRARY_S * 5 * 16 * 16 / 1e6, rel=0.01)
    assert preparation_s("squares", shape_of()) == SQUARE_S


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "most"), [(2, 1, 2, 2), (2, 4, 1, 1), (208, 8, MAX_THREADS, 26), (12, 4, 3, 3)]
)
def test_ranks_share_cores(cores: int, ranks: int, threads: int, most: int) -> None:
    assert (threads_of(cores, ranks), max_threads_of(cores, ranks)) == (threads, most)
    one = preparation_s("squares", shape_of())
    for setting, used in (("auto", most), (1, 1), (2, min(2, most)), (999, most)):
        expected = one if used == 1 else one / (used * THREAD_SHARE)
        found = rank_preparation_s("squares", shape_of(), setting, cores=cores, ranks=ranks)  # type: ignore[arg-type]
        assert found == pytest.approx(expected), setting


def test_threads_of_published_processors_are_not_counted_on() -> None:
    shape = shape_of()
    assert rank_preparation_s("published", shape, "auto", cores=208, ranks=8) == preparation_s("published", shape)


def test_the_planners_page_has_these_figures() -> None:
    page = (ROOT / "docs/reference/planner.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| waiting for prepared images")]
    assert all(f"{1000 * seconds:g} ms" in row for seconds in (SQUARE_S, PATCHES_S, LIBRARY_S))
