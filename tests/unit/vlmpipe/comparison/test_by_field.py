"""Runs compared on slices by fields: the test is the gate's, and is corrected for the number of slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.compared_runs import compared, make
from vlmpipe.cli.views.comparison import print_comparison
from vlmpipe.comparison.by_field import field_differences
from vlmpipe.comparison.page import build_page
from vlmpipe.trainer.evaluation.significance.paired import paired_counts
from vlmpipe.trainer.evaluation.significance.slices import p_of_pair
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import seal_lines, unseal_lines

COUNT, HOSTILE = 80, "<script>alert(1)</script>"


def line(number: int, correct: bool) -> dict[str, Any]:
    fields = {"camera": "rear" if number % 2 else "front", "serial": f"no. {number}", "hour": str(number % 4)}
    return {"correct": correct, "fields": fields if number < COUNT - 2 else {}}


def test_differences_are_paired_and_corrected() -> None:
    """The second run answers 12 questions of the rear camera that the first one does not."""
    first = [line(number, number >= 40) for number in range(COUNT)]
    second = [line(number, number >= 40 or (number % 2 == 1 and number < 24)) for number in range(COUNT)]
    groups = [f"image-{number}" for number in range(COUNT)]
    found = field_differences(["first", "second"], [first, second], groups)
    rows = {(one.field, one.value): one for one in found.rows}
    assert (
        found.notes[1] == "serial of data.slices is left out: it has 78 values in 80 questions, more than 50 slices: "
        "name one with fewer"
    )
    assert found.notes[0] == "2 questions have no camera (data.slices), and are in none of its slices"
    assert {field for field, _ in rows} == {"camera", "hour"}, "a field with a value for each question gives none"
    rear, front = rows["camera", "rear"], rows["camera", "front"]
    assert (rear.questions, rear.images, rear.verdict, front.verdict) == (39, 39, "better", "no difference shown")
    assert rear.difference == pytest.approx(12 / 39) and rear.this - rear.first == pytest.approx(rear.difference)
    assert rear.difference_interval[0] > 0 == front.difference
    numbers = [number for number in range(COUNT - 2) if number % 2]
    counts = paired_counts(
        [groups[n] for n in numbers], [second[n]["correct"] for n in numbers], [first[n]["correct"] for n in numbers]
    )
    own = p_of_pair(counts)
    assert own is not None and rear.p_corrected == pytest.approx(6 * own), "the smallest of six"
    unnamed = [{"correct": one["correct"]} for one in first]
    later = field_differences(["first", "second"], [unnamed, second], groups)
    assert later == found, "the first run's data was prepared before fields were named"


def test_runs_without_fields_have_no_rows() -> None:
    answers = [{"correct": True} for _ in range(COUNT)]
    found = field_differences(["first", "second"], [answers, answers], list(map(str, range(COUNT))))
    assert not found.rows and not found.notes


def test_page_and_screen_show_values_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, more in (("first", 0), ("second", 24)):
        answers = [(f"s{n}", "red", "red" if n >= 40 or (n % 2 and n < more) else "blue") for n in range(COUNT)]
        store = open_storage(str(make(tmp_path, name, answers)))
        lines = unseal_lines(store.read("predictions.jsonl"))
        for number, answered in enumerate(lines):
            answered["fields"] = {
                "camera": f"{HOSTILE}\n{'x' * 999}" if number % 2 else "front",
                "id": f"{HOSTILE}{number}",
            }
        store.write("predictions.jsonl", seal_lines(lines))
    comparison = compared(tmp_path, "first", "second")
    page = build_page(comparison)
    assert HOSTILE not in page and "&lt;script&gt;" in page[page.index("By field") :]
    left_out = "id of data.slices is left out: it has 80 values in 80 questions, more than 50 slices"
    assert left_out[1:] in page
    print_comparison(comparison)
    said = capsys.readouterr().out
    assert " ".join(said.split()).count(left_out) == 1
    assert f"camera: {HOSTILE} ... " in said and "xxx" not in said
    assert "1 values of fields (data.slices) with no difference shown" in said
    assert [row.verdict for row in comparison.by_field] == ["better", "no difference shown"]
