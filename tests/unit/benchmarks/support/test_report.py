"""What a benchmark's figures say."""

from __future__ import annotations

import pytest

from benchmarks.support.report import Report, Side, UnfairError


def test_a_comparison_that_is_not_fair_gives_no_figures() -> None:
    report = Report("test")
    with pytest.raises(UnfairError, match="the same losses"):
        report.require(False, "the same losses")
    assert report.checks == []


def test_a_ratio_is_the_median_of_each_rounds_own() -> None:
    report = Report("test")
    # The second round was slow for both sides: that is the machine, and every round says two.
    report.compare("claim", "data", "samples / CPU s", Side("ours", [10, 2, 12]), Side("theirs", [5, 1, 6]))
    (row,) = report.rows
    assert (row.ratio, row.quartiles, row.ours, row.baseline) == (2.0, (2.0, 2.0), 10, 5)


def test_a_summary_has_the_median_and_the_largest_error_without_signs() -> None:
    report = Report("test")
    for predicted in (90, 102, 100):
        report.predict("memory", "case", "MiB", predicted, 100)
    assert report.summary() == ["memory: 3 rows, median error 2.0%, largest 10.0%"]
