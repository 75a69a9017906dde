"""A run's report for Python: its scores with their baselines, and its model."""

from __future__ import annotations

from pathlib import Path

from tests.support.runs_root import write_run
from vlmpipe.runs.folders.summary import evaluation_lines, report_of
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record


def test_scores_have_baselines_and_benchmarks_and_no_counts(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a")
    report = report_of(folder)
    assert (report.scores, report.model) == ({}, None)
    evaluation = {
        "questions": 88,
        "exact_match": 0.94,
        "chance": None,
        "controls": {"no_image": {"exact_match": 0.2}},
        "benchmarks": {"mmmu": {"scores": {"accuracy": 0.31}}},
    }
    write_record(LocalStorage(folder), "evaluate.json", evaluation)
    LocalStorage(folder).write("export/config.json", b"{}")
    assert report.scores == {"exact_match": 0.94, "no_image.exact_match": 0.2, "mmmu.accuracy": 0.31}
    assert report.model == folder / "export"


def test_a_control_says_on_how_many_questions_it_stands_and_how_many_images_were_resized() -> None:
    control = {"questions": 60, "exact_match": 0.25, "left_out": 10, "resized": 8}
    evaluation = Evaluation.of({"questions": 70, "controls": {"shuffled_image": control}}, "evaluate.json")
    (line,) = (line for line in evaluation_lines(evaluation) if "another sample's image" in line)
    assert line.startswith("same model with another sample's image, 60 questions, 8 images resized")
    assert line.endswith(" 25.0 %")


def test_slices_and_benchmarks_say_on_how_many_questions_they_stand() -> None:
    slices = {"digit": {"questions": 5, "exact_match": 0.8, "chance": 0.1}, "sum": {"questions": 1000}}
    benchmarks = {"mm": {"questions": 20, "asked": 40, "scores": {"accuracy": 0.5}}}
    found = {"questions": 1005, "slices": slices, "benchmarks": benchmarks}
    lines = [" ".join(line.split()) for line in evaluation_lines(Evaluation.of(found, "evaluate.json"))]
    assert "digit 80.0 % (5 questions, majority baseline 10.0 %)" in lines
    assert "mm: accuracy, 20 questions 0.500" in lines
