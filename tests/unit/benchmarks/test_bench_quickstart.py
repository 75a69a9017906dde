"""The table of the quickstart's random starts."""

from __future__ import annotations

from benchmarks.bench_quickstart import answers, table
from tests.support.paths import ROOT

EVALUATED = {
    "samples": 300,
    "questions": 1100,
    "exact_match": 0.95,
    "chance": 0.275,
    "controls": {"shuffled_image": {"exact_match": 0.21}, "no_image": {"exact_match": 0.22}},
}


def test_a_figure_is_a_range_with_its_spread() -> None:
    found = [answers(seed, EVALUATED | {"exact_match": share}) for seed, share in enumerate((0.95, 0.93, 0.94))]
    lines = table(found)
    assert lines[2] == "| 0 | 1,100 | 95.0 % | 21.0 % | 22.0 % | 27.5 % |"
    assert lines[-2].startswith("| range | | 93.0 to 95.0 % | 21.0 to 21.0 % |")
    assert lines[-1].startswith("| standard deviation, points | | 1.0 | 0.0 |")


def test_one_start_has_no_spread() -> None:
    assert table([answers(0, EVALUATED)])[-1].startswith("| range |")


def test_the_readme_has_the_range_of_the_newest_results() -> None:
    newest = sorted((ROOT / "benchmarks/results").glob("*-cpu-quickstart.md"))[-1]
    (line,) = (line for line in newest.read_text().splitlines() if line.startswith("| range |"))
    right_image = line.split("|")[3].strip()
    (claim,) = (line for line in (ROOT / "README.md").read_text().splitlines() if "quickstart's model uses" in line)
    assert f": {right_image} of 1,100 validation questions" in claim and newest.name in claim
