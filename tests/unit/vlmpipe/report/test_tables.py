"""Tables of answers: intervals by images, and confusions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from tests.support.reports import predictions
from vlmpipe.report.load import RunFiles
from vlmpipe.report.tables import comparison, confusions, training_facts
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.summary import Summary


def test_the_interval_is_by_images_where_the_answers_name_them() -> None:
    """60 right of 120 questions: of 12 images that are read whole or not at all, and of as many images as questions."""
    measured = Evaluation(exact_match=0.5, questions=120)
    answers = [{"correct": number // 10 % 2 == 0} for number in range(120)]
    unnamed, apart, together = (
        comparison(measured, [one | {"image_group": name(number)} for number, one in enumerate(answers)])[0]
        for name in (lambda _: "", str, lambda number: str(number // 10))
    )
    assert (unnamed["basis"], apart["basis"]) == (", taking questions as independent", ", by 120 images")
    assert (unnamed["low"], unnamed["high"]) == pytest.approx((apart["low"], apart["high"]))
    assert together["basis"] == ", by 12 images"
    assert together["high"] - together["low"] > 2.5 * (apart["high"] - apart["low"])


@given(predictions)
def test_every_prediction_is_counted_once_in_its_confusion_table(lines: list[dict[str, Any]]) -> None:
    tables, left_out = confusions(lines, None)
    assert not left_out
    for name, table in tables:
        of_slice = [line for line in lines if line["slice"] == name]
        assert sum(map(sum, table.counts)) == len(of_slice)
        diagonal = sum(line[number] for number, line in enumerate(table.counts))
        assert diagonal == sum(line["correct"] for line in of_slice)


def test_the_report_says_why_training_ended_early_and_which_step_was_the_best() -> None:
    best: dict[str, Any] = {"best_metric": "validation_loss", "best_step": 14, "best_value": 0.43218}
    summary = Summary(steps=1018, total_steps=1400, ended_early="validation loss is not better", **best)
    said = dict(training_facts(RunFiles("", "one", summary=summary)))
    assert said["Ended early"] == "after 1,018 of 1,400 steps: validation loss is not better"
    assert said["Best validated step"] == "14, validation loss 0.4322"
    said = dict(training_facts(RunFiles("", "one", summary=Summary(steps=1400, total_steps=1400))))
    assert not {"Ended early", "Best validated step"} & said.keys()
