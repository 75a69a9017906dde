"""The picture of forecasts beside published runs."""

from __future__ import annotations

from benchmarks.bench_published import PICTURE, picture
from benchmarks.planner.published_runs import outcomes, published_text_runs
from tests.support.paths import ROOT


def test_the_picture_in_the_docs_is_that_of_the_forecasts() -> None:
    drawn = picture(outcomes(), outcomes(published_text_runs()))
    assert (ROOT / PICTURE).read_text(encoding="utf-8") == drawn, "make bench-published args=--picture draws it anew"
