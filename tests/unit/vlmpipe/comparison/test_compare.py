"""Comparison of runs: figures worked out by hand on few questions, and what is said of runs that cannot be compared."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.compared_runs import Answers, compared, make, run_file
from vlmpipe.cli.views.comparison import print_comparison
from vlmpipe.comparison.compare import SEEDS
from vlmpipe.comparison.page import build_page
from vlmpipe.comparison.predictions import write_predictions
from vlmpipe.comparison.sides import read_sides
from vlmpipe.comparison.usage_figures import NOT_RECORDED, usage_figures
from vlmpipe.registry.folder import Candidate, FolderRegistry
from vlmpipe.trainer.config.benchmarks import BenchmarkConfig
from vlmpipe.trainer.config.job import RunPaths
from vlmpipe.trainer.data.sample import ImageRef
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError
from vlmpipe.trainer.evaluation.benchmarks.question import BenchmarkQuestion
from vlmpipe.trainer.evaluation.benchmarks.run import write_scores
from vlmpipe.trainer.evaluation.generate import GeneratedAnswer
from vlmpipe.trainer.evaluation.significance.bootstrap import MIN_GROUPS, difference_interval, resampled_sums
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import seal_lines, write_record

FIRST: Answers = [("a", "red", "red"), ("a", "two", "two"), ("b", "red", "blue"), ("c", "two", "three")]
BETTER: Answers = [("a", "red", "red"), ("a", "two", "2"), ("b", "red", "red"), ("c", "two", "two")]


def test_scores_differences_and_agreement_are_those_of_the_answers(tmp_path: Path) -> None:
    make(tmp_path, "first", FIRST)
    make(tmp_path, "better", BETTER)
    found = compared(tmp_path, "first", "better")
    rows = {(row.slice, row.metric): row for row in found.scores}
    first, better = rows["", "exact_match"].runs
    assert (first.value, better.value, better.difference) == (0.5, 0.75, 0.25)
    assert [one.value for one in rows["", "vqa_accuracy"].runs] == [0.5, 1.0], "2 is two"
    assert [one.value for one in rows["count", "exact_match"].runs] == [0.5, 0.5]
    assert rows["colour", "exact_match"].questions == 2
    sums = resampled_sums(["a", "a", "b", "c"], [(0, 1), (-1, 1), (1, 1), (1, 1)])
    assert better.difference_interval == pytest.approx(difference_interval(0.25, sums[:, 0] / sums[:, 1], 3))
    assert (rows["", "exact_match"].images, first.verdict, better.verdict) == (3, "", "too few images")
    (agreement,) = found.agreement
    assert (agreement.both_right, agreement.only_first, agreement.only_this, agreement.both_wrong) == (1, 1, 2, 0)
    assert [(one.id, one.predictions, one.correct) for one in found.disagreements] == [
        ("a", ("two", "2"), (True, False)),
        ("b", ("blue", "red"), (False, True)),
        ("c", ("three", "two"), (False, True)),
    ]
    assert found.notes == ("the 4 questions are about 3 images, which are what chance draws", SEEDS)


def test_the_verdict_comes_first_then_what_the_runs_were_set_and_made_with_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def settings(name: str, rate: float, **model: Any) -> dict[str, Any]:
        train = {"optimizer": {"learning_rate": rate}, "epochs": 1}
        return {"run": {"run_id": name, "root_uri": str(tmp_path)}, "train": train, "model": model}

    versions = {"torch": "2.13.0", "peft": "0.21.2"}
    make(tmp_path, "first", FIRST, run=settings("first", 1e-3, lora=None), summary={"versions": versions})
    lora = settings("tuned", 2e-3, lora={"parts": ["[red]", "tower"]})
    data = {"prepared_uri": str(tmp_path / "other"), "features_uri": "", "features": "off"}
    make(tmp_path, "tuned", BETTER, run=lora, summary={"versions": versions | {"torch": "2.12.0"}}, prepared=data)
    found = compared(tmp_path, "first", "tuned")
    assert {row.field: row.values for row in found.settings} == {
        "train.optimizer.learning_rate": ("0.001", "0.002"),
        "model.lora.parts": ("none", '["[red]", "tower"]'),
        "prepared data": ("none", "other"),
        "torch": ("2.13.0", "2.12.0"),
    }
    print_comparison(found)
    out = capsys.readouterr().out
    assert (
        out.index("too few images: ") < out.index("learning_rate") < out.index("exact_match, 4 questions")
        and "[red]" in out
    )
    assert "learning_rate" in build_page(found)
    make(tmp_path, "same", BETTER, run=settings("same", 1e-3, lora=None), summary={"versions": versions})
    same = compared(tmp_path, "first", "same")
    print_comparison(same)
    assert same.settings == () and "are equal" in capsys.readouterr().out


@pytest.mark.parametrize("verdict", ["none shown", "few images"])
def test_scores_fit_a_terminal_and_stand_next_to_the_baseline_of_their_questions(
    verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids as runs get them, whole; a baseline only where all questions of the first run are compared."""
    monkeypatch.setattr("vlmpipe.runs.terminal.COLUMNS", 80)
    first, second = "llava-local-20261128-221147", "llava-local-20261129-080910"
    rows = [(f"s{number}", ("red", "two")[number % 2], "red") for number in range(24)]
    slices = {"colour": {"questions": 12, "chance": 0.5}, "count": {"questions": 11, "chance": 0.25}}
    make(tmp_path, first, rows, evaluate={"questions": 24, "chance": 0.375, "slices": slices})
    make(tmp_path, second, [(one, right, right) for one, right, _ in rows[:3]] + rows[3:])
    if verdict == "few images":
        make(tmp_path, first, rows, 2, evaluate={"questions": 24, "chance": 0.375, "slices": slices})
    found = compared(tmp_path, first, second)
    baselines = {(row.slice, row.metric): row.baseline for row in found.scores if row.baseline is not None}
    assert baselines == {("", "exact_match"): 0.375, ("colour", "exact_match"): 0.5}
    print_comparison(found)
    lines = capsys.readouterr().out.split("differs   95 %")[1].split("right on")[0].splitlines()
    assert max(map(len, lines)) <= 80
    assert ["majority", "baseline", "0.375"] in [line.split() for line in lines]
    assert any(line.startswith(f"  {second} ") and line.rstrip().endswith(verdict) for line in lines)
    assert "majority baseline" in build_page(found)


def test_a_difference_on_every_sample_is_beyond_chance_in_its_direction(tmp_path: Path) -> None:
    many = [(f"s{number}", "red", "red") for number in range(20)]
    for name, wrong in (("right", 0), ("once-wrong", 1), ("wrong", 20)):
        make(
            tmp_path,
            name,
            [(sample, answer, "blue" if n < wrong else said) for n, (sample, answer, said) in enumerate(many)],
        )
    row = compared(tmp_path, "once-wrong", "right", "wrong").scores[0]
    assert [one.verdict for one in row.runs] == ["", "no difference shown", "worse"]
    assert compared(tmp_path, "wrong", "right").scores[0].runs[1].verdict == "better"


@pytest.mark.parametrize(("images", "verdict"), [(0, "better"), (12, "no difference shown"), (5, "too few images")])
def test_samples_that_share_images_are_no_independent_evidence(tmp_path: Path, images: int, verdict: str) -> None:
    """A record for each question, as many data sets have them: the same answers, of 60 images or of fewer."""
    many = [(f"s{number}", "red", "blue" if number % 12 < 2 else "red") for number in range(60)]
    make(tmp_path, "first", many, images)
    make(tmp_path, "better", [(sample, answer, answer) for sample, answer, _ in many], images)
    found = compared(tmp_path, "first", "better")
    assert (found.scores[0].images, found.scores[0].runs[1].verdict) == (images or 60, verdict)
    note = f"the 60 questions are about {images} images, which are what chance draws"
    assert (note in found.notes) == bool(images)
    print_comparison(found)
    build_page(found)


def test_one_image_has_no_interval_of_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (("first", "blue"), ("better", "red")):
        make(tmp_path, name, [(f"s{number}", "red", said) for number in range(MIN_GROUPS)], images=1)
    found = compared(tmp_path, "first", "better")
    assert found.scores[0].runs[1].difference_interval is None
    assert found.as_json()["scores"][0]["runs"][1]["verdict"] == "too few images"
    print_comparison(found)
    assert "–" in capsys.readouterr().out and '<td class="num" data-label="Interval">–' in build_page(found)


def test_answers_of_unknown_images_are_drawn_by_sample_and_that_is_said(tmp_path: Path) -> None:
    for name in ("first", "better"):
        folder = make(tmp_path, name, FIRST, prepared={"prepared_uri": "gone", "features_uri": "", "features": "off"})
        lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
        content = seal_lines([{key: line[key] for key in line if key != "image_group"} for line in lines])
        (folder / "predictions.jsonl").write_bytes(content)
    found = compared(tmp_path, "first", "better")
    assert (
        found.notes[0].startswith("which questions of first share images is not known") and found.scores[0].images == 3
    )


def test_only_shared_questions_count_and_the_rest_is_named(tmp_path: Path) -> None:
    make(tmp_path, "first", [*FIRST, ("d", "red", "red")])
    make(tmp_path, "other", [*BETTER, ("e", "red", "red"), ("f", "red", "red")])
    found = compared(tmp_path, "first", "other")
    assert found.questions == 4
    assert found.notes[0] == "2 questions that not all runs were asked are left out"


def test_runs_that_share_no_question_are_refused_in_a_sentence(tmp_path: Path) -> None:
    make(tmp_path, "first", FIRST)
    make(tmp_path, "other", [("z", "red", "red")])
    with pytest.raises(DataError, match=r"share no question: first 4, other 1") as error:
        compared(tmp_path, "first", "other")
    assert error.value.code == ExitCode.DATA


def test_runs_that_are_not_there_or_not_evaluated_are_named(tmp_path: Path) -> None:
    folder = make(tmp_path, "first", FIRST)
    with pytest.raises(ConfigError, match="one run is named"):
        read_sides(["first"], str(tmp_path))
    with pytest.raises(ConfigError, match="named twice"):
        read_sides(["first", "first"], str(tmp_path))
    with pytest.raises(UserError, match="no run 'gone'") as error:
        read_sides(["first", "gone"], str(tmp_path))
    assert error.value.code == ExitCode.NOT_FOUND
    with pytest.raises(UserError, match="no digits@champion in the registry") as error:
        read_sides(["first", "digits@champion"], str(tmp_path))
    assert error.value.code == ExitCode.NOT_FOUND
    make(tmp_path, "other", BETTER)
    (folder / "predictions.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"first has no predictions.jsonl, which the step evaluate writes"):
        read_sides(["first", "other"], str(tmp_path))


def test_a_champion_and_a_version_are_found_by_the_models_name(tmp_path: Path) -> None:
    registry = FolderRegistry(str(tmp_path / "registry"))
    for place, (name, answers) in enumerate((("first", FIRST), ("better", BETTER))):
        folder = make(tmp_path, name, answers)
        (folder / "export").mkdir()
        (folder / "export/config.json").write_text("{}")
        candidate = Candidate(run_id=name, export_uri=str(folder / "export"), metrics={})
        registry.register("digits", candidate, "card")
        registry.promote("digits", place + 1, instead_of=place or None)
    later: dict[str, Any] = run_file().to_run_json(RunPaths(run_id="newest", root_uri=str(tmp_path)))
    later["train"] |= {"of_a_later_version": 1}
    make(tmp_path, "newest", BETTER, run=later)
    sides = read_sides(["digits@champion", "digits@1", "newest"], str(tmp_path))
    assert [(side.name, side.run_id) for side in sides] == [
        ("digits@champion", "better"), ("digits@1", "first"), ("newest", "newest")
    ]  # fmt: skip
    assert [side.run_id for side in read_sides(["digits@1", "digits@2"], str(tmp_path))] == ["first", "better"]


def test_rotations_of_a_multiple_choice_do_not_count_as_in_the_report(tmp_path: Path) -> None:
    """CircularEval asks each question again with its choices in another order; `accuracy` is that of the originals."""
    orders = {"": (("A", "red"), ("B", "blue")), "rotated": (("A", "blue"), ("B", "red"))}
    questions = [
        BenchmarkQuestion(f"{number}{order}", "Which?", ImageRef(f"{number}.png", bytes), answer, choices=choices,
                          group=str(number))
        for number in range(4)
        for (order, choices), answer in zip(orders.items(), [("A",), ("B",)], strict=True)
    ]  # fmt: skip
    reported = []
    for name, said in {"first": "AAAAAABA", "other": "ABBAABBB"}.items():  # each original and its rotation
        folder = make(tmp_path, name, FIRST)
        job: Any = SimpleNamespace(run=SimpleNamespace(run_uri=str(folder)))
        answers = [GeneratedAnswer(letter, "stop") for letter in said]
        config = BenchmarkConfig(name="mm", format="mmbench", uri="questions.tsv")
        described: dict[str, Any] = write_scores(job, config, questions, answers)
        reported.append(described["scores"]["accuracy"])
        assert (described["questions"], described["asked"]) == (4, 8), "what a score stands on, and what was asked"
        make(tmp_path, name, FIRST, evaluate={"questions": 4, "benchmarks": {"mm": described}})
    (row,) = compared(tmp_path, "first", "other").benchmarks
    assert (row.slice, row.metric, row.questions, row.images) == ("mm", "accuracy", 4, 4)
    assert [run.value for run in row.runs] == reported == [0.75, 0.5]


def test_benchmarks_of_the_same_questions_are_compared_and_others_are_named(tmp_path: Path) -> None:
    for name, scores, digest in (("first", (0.0, 1.0), "x"), ("other", (1.0, 1.0), "y")):
        described = {
            "pope": {"format": "pope", "questions_sha256": "same"},
            "textvqa": {"format": "textvqa", "questions_sha256": digest},
            "mme": {"format": "lmms-eval", "questions_sha256": "same", "compared": "acc"},
            "group": {"format": "lmms-eval", "questions_sha256": "", "compared": ""},
        }
        folder = make(tmp_path, name, FIRST, evaluate={"questions": 4, "benchmarks": described})
        lines = [{"image": f"{number}.jpg", "score": score} for number, score in enumerate(scores)]
        for file in ("pope", "mme"):
            open_storage(str(folder)).write(f"benchmarks/{file}.jsonl", seal_lines(lines))
    found = compared(tmp_path, "first", "other")
    assert [(row.slice, row.metric, row.questions) for row in found.benchmarks] == [
        ("pope", "accuracy", 2), ("mme", "acc", 2)
    ]  # fmt: skip
    assert [[one.value for one in row.runs] for row in found.benchmarks] == [[0.5, 1.0]] * 2
    assert found.notes[:2] == (
        "benchmark textvqa is left out: not all runs were asked the same questions",
        "benchmark group is left out: none of its scores is a mean over questions",
    )


def test_time_cost_and_tokens_are_those_of_the_runs_records(tmp_path: Path) -> None:
    jobs = [{"job": "train", "usd_per_hour": 12.0}, {"job": "evaluate", "usd_per_hour": 3.0}]
    folder = make(tmp_path, "first", FIRST, summary={"tokens": 7000}, plan={"cost": {"usd": 40.0, "steps": jobs}})
    times = {"train": (1000.0, 1000.0 + 1.5 * 3600), "evaluate": (7000.0, 7000.0 + 0.5 * 3600)}
    for step, (began, ended) in times.items():
        record = {"step": step, "started_s": began, "ended_s": ended}
        write_record(open_storage(str(folder)), f"steps/{step}.json", record)
    make(tmp_path, "other", BETTER)
    first, other = read_sides(["first", "other"], str(tmp_path))
    assert first.usage.hours == pytest.approx((7000 + 1800 - 1000) / 3600)
    assert (first.usage.train_hours, first.usage.tokens, first.usage.planned_usd) == (1.5, 7000, 40.0)
    assert first.usage.usd == pytest.approx(1.5 * 12 + 0.5 * 3)
    assert set(vars(other.usage).values()) == {None}


def test_an_interrupted_run_is_not_cheaper_than_it_was(tmp_path: Path) -> None:
    """The records of steps have the times of the last start."""
    summary = {"tokens": 9000, "wall_s": 6 * 3600.0, "starts": 3, "steps_made": 70, "steps_repeated": 10}
    plan = {"cost": {"usd": 40.0, "steps": [{"job": "train", "usd_per_hour": 12.0}]}}
    folder = make(tmp_path, "first", FIRST, summary=summary, plan=plan)
    record = {"step": "train", "started_s": 1000.0, "ended_s": 1000.0 + 2 * 3600}
    write_record(open_storage(str(folder)), "steps/train.json", record)
    make(tmp_path, "other", BETTER)
    first, other = read_sides(["first", "other"], str(tmp_path))
    assert (first.usage.hours, first.usage.train_hours, first.usage.usd) == (6.0, 6.0, 6 * 12.0)
    assert usage_figures(first.usage)["Starts"] == "3, 10 steps twice"
    assert usage_figures(other.usage)["Starts"] == NOT_RECORDED


HOSTILE = "<script>window.hit = 1</script>"


def test_the_page_holds_the_figures_and_runs_nothing(tmp_path: Path) -> None:
    make(tmp_path, "first", [*FIRST, ("d", "red", HOSTILE)])
    make(tmp_path, "better", [*BETTER, ("d", "red", "red")])
    page = build_page(compared(tmp_path, "first", "better"))
    assert "<script" not in page and "&lt;script&gt;" in page
    for text in ("40.0%", "80.0%", "+0.400", "5 validation questions", "4 of 4 questions"):
        assert text in page, text


def test_answers_of_all_runs_are_one_table(tmp_path: Path) -> None:
    make(tmp_path, "first", FIRST)
    make(tmp_path, "better", [*BETTER, ("d", "red", "red")])
    assert write_predictions(compared(tmp_path, "first", "better"), tmp_path / "a.parquet") == 9
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["run"] for row in rows] == ["first"] * 4 + ["better"] * 5
    assert rows[2] == {
        "run": "first", "id": "b", "turn": 2, "slice": "colour", "question": "What?", "answer": "red",
        "prediction": "blue", "correct": False,
    }  # fmt: skip


def test_answers_are_lines_in_the_columns_of_the_evaluation_service(tmp_path: Path) -> None:
    """The columns' names are those of the SDK that is installed."""
    make(tmp_path, "first", FIRST)
    make(tmp_path, "better", [*BETTER, ("d", "red", "grün")])
    folder = importlib.util.find_spec("vertexai").submodule_search_locations[0]  # type: ignore[union-attr, index]
    columns = runpy.run_path(f"{folder}/evaluation/constants.py")["Dataset"]
    assert write_predictions(compared(tmp_path, "first", "better"), tmp_path / "a.jsonl") == 9
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    place = {"id": "b", "turn": 2, "slice": "colour"}
    asked = {columns.PROMPT_COLUMN: "What?", columns.REFERENCE_COLUMN: "red"}
    assert rows[2] == {"run": "first", **place, **asked, columns.MODEL_RESPONSE_COLUMN: "blue"}
    assert rows[6] == {
        "run": "better", **place, **asked, columns.MODEL_RESPONSE_COLUMN: "red",
        columns.BASELINE_MODEL_RESPONSE_COLUMN: "blue",
    }  # fmt: skip
    assert columns.BASELINE_MODEL_RESPONSE_COLUMN not in rows[8], "the first run was not asked it"


def test_answers_in_another_kind_of_file_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "first", FIRST)
    make(tmp_path, "better", BETTER)
    with pytest.raises(ConfigError, match=r"--predictions .*a\.xlsx"):
        write_predictions(compared(tmp_path, "first", "better"), tmp_path / "a.xlsx")
    assert not (tmp_path / "a.xlsx").exists()
