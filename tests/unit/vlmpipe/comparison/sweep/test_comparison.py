"""What the comparison of a sweep says of trainings that are done, failed or missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vlmpipe.comparison.sweep.comparison import compared
from vlmpipe.comparison.sweep.page import build_page
from vlmpipe.comparison.sweep.results import Key, SweepResults, Training
from vlmpipe.records.sweep_comparison import SweepComparison
from vlmpipe.runs.folders.sweep import comparison_lines
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.sweep import Claim, Sweep, SweepVariant
from vlmpipe.trainer.storage import open_storage

QUESTIONS: list[Key] = [(f"s{number}", 0, "digit?", "7") for number in range(50)]


def training(variant: str, start: int, right: int, *, tokens: float | None = None, train_s: float = 10.0) -> Training:
    return Training(
        variant,
        start,
        f"runs/{variant}/{start}",
        scores={key: float(place < right) for place, key in enumerate(QUESTIONS)},
        evaluation=Evaluation(relevance={"mean_image_tokens": tokens} if tokens else None),
        train_s=train_s,
        evaluate_s=2.0,
    )


def results(trainings: list[Training], *, hypotheses: Sequence[Claim] = ()) -> SweepResults:
    names = list(dict.fromkeys(one.variant for one in trainings))
    variants = tuple(SweepVariant(name=name, values={"train.seed": seed}) for seed, name in enumerate(names))
    sweep = Sweep(
        metric="exact_match",
        baseline=names[0],
        starts=1,
        parallelism=1,
        hypotheses=tuple(hypotheses),
        variants=variants,
        trainings=(),
        jobs=(),
    )
    return SweepResults(sweep, trainings, job_s=100.0)


def of(found: SweepComparison, name: str) -> Any:
    return next(one for one in found.variants if one.name == name)


def claim(variant: str, *against: str, margin: float = 0.0, text: str = "") -> Claim:
    return Claim(claim=text or f"{variant} wins", variant=variant, against=against, margin=margin)


def test_variants_are_compared_with_the_baseline_and_hypotheses_answered() -> None:
    trainings = [training("base", start, 20, tokens=9, train_s=5) for start in range(3)]
    trainings += [training("good", start, 45 + start % 2, tokens=4) for start in range(3)]
    trainings += [training("same", start, 20, tokens=16) for start in range(3)]
    claims = [
        claim("good", "base", "same"),
        claim("same", "good"),
        claim("base", "good", margin=0.1),
        claim("x", "base"),
    ]
    claims.append(claim("same", "base"))
    found = compared(results(trainings, hypotheses=claims))
    assert (found.best, found.questions, found.failed) == ("good", 50, 0)
    assert (of(found, "good").verdict, of(found, "same").verdict, of(found, "base").verdict) == (
        "better",
        "no difference shown",
        "",
    )
    assert of(found, "good").score.value == pytest.approx((45 + 46 + 45) / 150)
    assert [one.answer for one in found.hypotheses] == [
        "supported",
        "contradicted",
        "contradicted",
        "not measured",
        "not shown",
    ]
    # Fewer tokens and a better score; the baseline took less time.
    assert of(found, "good").on_front == ("image_tokens", "device_hours")
    assert of(found, "base").on_front == ("device_hours",)
    assert found.share_outside == pytest.approx(1 - (found.train_s + found.evaluate_s) / 100)


def test_a_failed_training_leaves_the_others() -> None:
    trainings = [training("base", 0, 20), Training("base", 1, "runs/base/1", error="out of memory")]
    trainings += [Training("bad", 0, "runs/bad/0", error="no such channel"), training("good", 0, 40)]
    found = compared(results(trainings, hypotheses=[claim("bad", "base")]))
    assert (of(found, "base").starts, of(found, "base").errors) == (1, ("out of memory",))
    assert (of(found, "bad").score, of(found, "bad").verdict) == (None, "failed")
    assert found.hypotheses[0].answer == "not measured"
    assert "2 trainings failed" in found.sentence
    page, lines = build_page(found, "sweep-1"), comparison_lines(found)
    for text in ("no such channel", "out of memory"):
        assert text in page
        assert any(text in line for line in lines)


def test_a_screen_says_what_it_leaves_out_and_what_could_have_been_seen() -> None:
    trainings = [training(f"v{number:03}", start, 20 + start) for number in range(60) for start in range(2)]
    found = compared(results(trainings))
    lines = comparison_lines(found)
    assert sum("no difference shown" in line and line.startswith("  v") for line in lines) == 39  # beside the baseline
    assert "  and 20 more variants, 0.410 to 0.410: see the report" in lines
    assert any(line.startswith("note: where no difference is shown, one of 0.") for line in lines)


def test_a_continued_sweep_has_no_share_of_time_that_was_neither() -> None:
    trainings = [training("base", start, 20, train_s=60.0) for start in range(3)] + [training("good", 0, 40)]
    assert compared(results(trainings)).share_outside is None  # of jobs that took 100 s in their last attempt


def test_without_the_baseline_scores_stay_and_differences_do_not() -> None:
    trainings = [Training("base", 0, "runs/base/0", error="stopped"), training("good", 0, 40)]
    found = compared(results(trainings))
    assert of(found, "good").score.value == pytest.approx(0.8)
    assert of(found, "good").difference is None


@pytest.mark.parametrize(("images", "verdict"), [(50, "better"), (5, "too few images: no verdict")])
def test_samples_that_share_images_are_drawn_together(images: int, verdict: str) -> None:
    groups = {key[0]: str(number % images) for number, key in enumerate(QUESTIONS)}
    trainings = [
        replace(training(name, start, right), image_groups=groups)
        for name, right in (("base", 20), ("good", 45))
        for start in range(3)
    ]
    found = compared(results(trainings, hypotheses=[claim("good", "base")]))
    assert of(found, "good").verdict == verdict
    assert found.hypotheses[0].answer == ("supported" if images == 50 else "not shown")


def test_nothing_done_and_nothing_shared_are_errors() -> None:
    with pytest.raises(DataError, match="all 1 trainings of the sweep failed: out of memory"):
        compared(results([Training("a", 0, "runs/a/0", error="out of memory")]))
    other = Training("b", 0, "runs/b/0", scores={("z", 0, "q", "a"): 1.0})
    with pytest.raises(DataError, match="share no question"):
        compared(results([training("a", 0, 3), other]))


def test_names_and_values_are_escaped_in_the_page() -> None:
    trainings = [training("base", 0, 20), training("good", 0, 40)]
    case = results(trainings, hypotheses=[claim("good", "base", text="<script>x</script>")])
    assert "<script>x" not in build_page(compared(case), "<b>run</b>")
    assert "<b>run" not in build_page(compared(case), "<b>run</b>")


def test_a_comparison_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A field of a later version is left out; what follows from others is of them."""
    trainings = [training("base", 0, 20), training("good", 0, 40), Training("bad", 0, "runs/bad/0", error="stopped")]
    store = open_storage(str(tmp_path))
    written = compared(results(trainings, hypotheses=[claim("good", "base")]))
    written.write(store)
    file = tmp_path / SweepComparison.FILE
    content = json.loads(file.read_text())
    assert (content["best"], content["failed"]) == ("good", 1) and content["share_outside"] == written.share_outside
    assert SweepComparison.read(store) == written
    del content["record_crc32c"]
    file.write_text(json.dumps(content | {"best": "base", "of_a_later_version": 1}))
    assert SweepComparison.read(store).content() == written.content()
