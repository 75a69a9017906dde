"""Compare a sweep and write its report, with the learning curve where it is one."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpipe.comparison.curve.page import curve_section
from vlmpipe.comparison.curve.write import write_curve
from vlmpipe.comparison.sweep.comparison import compare_sweep
from vlmpipe.comparison.sweep.page import write_page
from vlmpipe.records.learning_curve import LearningCurve
from vlmpipe.records.sweep_comparison import SweepComparison


@dataclass(frozen=True)
class SweepReport:
    """The comparison and the curve of a sweep. page: the report's text."""

    comparison: SweepComparison
    curve: LearningCurve | None
    page: str


def write_sweep_report(run_uri: str) -> SweepReport:
    """Write comparison.json, curve.json of a learning curve, and the report. Raises DataError where no training is
    done."""
    comparison, curve = compare_sweep(run_uri), write_curve(run_uri)
    return SweepReport(comparison, curve, write_page(run_uri, comparison, curve_section(curve) if curve else None))
