"""Which answers are mixed up: every question is counted once, and a table is only made of a closed set of answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kfp.dsl import HTML, ClassificationMetrics, Metrics

from tests.support.reports import make_run
from vlmpipe.components.decide import decide
from vlmpipe.trainer.evaluation.confusion_matrix import MAX_ANSWERS, RULE, confusion_of, confusions, shown_confusion
from vlmpipe.trainer.evaluation.metrics import Prediction, is_right
from vlmpipe.trainer.records.evaluation import Evaluation

TEXTS = st.sampled_from(["0", "2", "10", "Yes", "yes.", "no", "other", "(other)", ""])


def asked(*pairs: tuple[str, str], slice_: str = "all") -> list[Prediction]:
    return [Prediction(f"s{n}", 0, slice_, "q", a, p, is_right(a, p)) for n, (a, p) in enumerate(pairs)]


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=60))
def test_every_question_is_counted_once_and_the_diagonal_is_exact_match(pairs: list[tuple[str, str]]) -> None:
    found = confusion_of(pairs)
    if found is None:
        assert len({answer.lower().removesuffix(".") for answer, _ in pairs}) < 2
        return
    assert found.questions == len(pairs)
    assert sum(row[n] for n, row in enumerate(found.counts)) == sum(is_right(*pair) for pair in pairs)
    names, rows = found.square()
    assert len(set(names)) == len(names) == len(rows) == len(rows[0])


def test_other_predictions_have_their_own_column() -> None:
    found = confusion_of([("10", "10"), ("10", "ten"), ("2", "2."), ("2", "10")])
    assert found is not None
    assert (found.answers, found.columns) == (("2", "10"), ("2", "10", "other"))
    assert found.counts == ((1, 1, 0), (0, 1, 1))
    assert found.square() == (["2", "10", "other"], [[1, 1, 0], [0, 1, 1], [0, 0, 0]])


ONCE = [("a", "a")] * 9 + [("b", "b")]
SELDOM = [("a", "a")] * 7 + [("b", "b")] * 2
MANY = [(str(n), "0") for n in range(MAX_ANSWERS + 1) for _ in range(5)]


@pytest.mark.parametrize(
    "pairs", [[], [("a", "b")] * 9, ONCE, SELDOM, MANY], ids=["none", "one", "once", "seldom", "many"]
)
def test_open_answers_have_a_note_and_no_matrix(pairs: list[tuple[str, str]]) -> None:
    found = confusions(asked(*pairs))
    assert (found["shown"], found["slices"]) == (None, {})
    assert found["note"] == f"no confusion matrix: no slice has {RULE}"
    assert shown_confusion(Evaluation.model_validate({"confusion": found})) == (None, found["note"])


@pytest.mark.parametrize("pairs", [[*SELDOM, ("a", "b")], MANY[5:]], ids=["fewest", "most"])
def test_the_bounds_of_the_rule_are_within_it(pairs: list[tuple[str, str]]) -> None:
    assert confusions(asked(*pairs))["shown"] == "all"


def test_the_slice_with_the_most_answers_is_shown_and_the_others_are_kept() -> None:
    two, three = [("yes", "no"), ("no", "no")] * 9, [("a", "a"), ("b", "b"), ("c", "a")] * 5
    found = json.loads(json.dumps(confusions([*asked(*two, slice_="even"), *asked(*three, slice_="letter")])))
    table, note = shown_confusion(Evaluation.model_validate({"confusion": found}))
    assert (found["shown"], set(found["slices"])) == ("letter", {"even", "letter"})
    assert table == confusion_of(three)
    assert note.endswith("; evaluate.json also has those of even")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


def collected(run: Path, tmp_path: Path, predictions: list[Prediction] | None) -> ClassificationMetrics:
    """What the step hands to KFP; None for an evaluation of an earlier version."""
    evaluation = json.loads((run / "evaluate.json").read_text())
    if predictions is not None:
        evaluation["confusion"] = confusions(predictions)
    (run / "evaluate.json").write_text(json.dumps(evaluation))
    confusion, report = ClassificationMetrics(), HTML(uri=str(tmp_path / "report.html"))
    scores, compared = Metrics(), Metrics()
    assert decide(str(run), "", scores, confusion, compared, report) in ("accepted", "rejected")
    assert scores.metadata["exact_match"] == evaluation["exact_match"]
    assert "<html" in Path(report.path).read_text(encoding="utf-8")
    return confusion


def test_the_console_gets_the_matrix_of_the_evaluation(run: Path, tmp_path: Path) -> None:
    found = collected(run, tmp_path, asked(*[("0", "0"), ("1", "seven")] * 5))
    assert found.metadata["confusionMatrix"] == {
        "annotationSpecs": [{"displayName": "0"}, {"displayName": "1"}, {"displayName": "other"}],
        "rows": [{"row": [5, 0, 0]}, {"row": [0, 0, 5]}, {"row": [0, 0, 0]}],
    }
    assert found.metadata["note"].startswith("answers of slice all")


@pytest.mark.parametrize("predictions", [None, asked(("a long caption", "another"))], ids=["earlier", "captions"])
def test_without_a_closed_set_the_artifact_says_why_and_has_no_matrix(
    run: Path, tmp_path: Path, predictions: list[Prediction] | None
) -> None:
    assert set(collected(run, tmp_path, predictions).metadata) == {"note"}
