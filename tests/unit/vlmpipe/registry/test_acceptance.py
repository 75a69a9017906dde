"""How often the gate accepts: the command's figures are those of the gate itself."""

from __future__ import annotations

import pytest
from scipy import stats

from tests.support.paths import ROOT
from vlmpipe.config.sections.output import GateConfig
from vlmpipe.records.decision import Champion
from vlmpipe.registry.acceptance import DIFFERENCES, DIFFERING, acceptance, gate_rates
from vlmpipe.registry.gate import AgainstChampion, decide
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts, default_margin
from vlmpipe.trainer.records.evaluation import Evaluation

CHAMPION = Champion(version=1, run_id="a", exact_match=0.5)


@pytest.mark.parametrize(("questions", "difference"), [(60, -0.05), (60, 0.0), (60, 0.1), (150, 0.02)])
def test_the_rate_is_that_of_decisions_over_all_outcomes(questions: int, difference: float) -> None:
    gate, differing = GateConfig(min_margin_over_chance=None, max_loss=9.0), 0.1
    accepted = 0.0
    for differ in range(questions + 1):
        weight = float(stats.binom.pmf(differ, questions, differing))
        for only_model in range(differ + 1) if weight > 1e-7 else ():
            answers = PairedCounts(
                questions=questions, only_model=only_model, only_other=differ - only_model, images=questions
            )
            likely = float(stats.binom.pmf(only_model, differ, (1 + difference / differing) / 2))
            evaluation = Evaluation(questions=questions, loss=1.0)
            accepted += weight * likely * decide(evaluation, gate, AgainstChampion(CHAMPION, answers)).accepted
    margin = gate.margin(questions)
    assert margin and acceptance(questions, differing, difference, margin) == pytest.approx(accepted, abs=1e-5)


def test_better_models_are_accepted_more_often_and_the_level_holds() -> None:
    for questions in (60, 300, 2000):
        rates = gate_rates(GateConfig(), questions)
        for of_share in rates.accepted.values():
            known = [rate for rate in of_share.values() if rate is not None]
            assert known == sorted(known)
        assert rates.margin
        level = acceptance(questions, 0.2, -rates.margin, rates.margin)
        assert level is not None and level <= 0.055
    assert set(rates.accepted) == set(DIFFERING) and set(of_share) == set(DIFFERENCES)


def test_the_page_states_what_is_computed() -> None:
    page = (ROOT / "docs/reference/gate.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    start = next(number for number, cells in enumerate(lines) if cells[0] == "questions" and len(cells) == 10)
    table = {int(cells[0].replace(",", "")): list(map(float, cells[1:])) for cells in lines[start + 2 :]}
    assert sorted(table) == [60, 200, 500, 1000, 2000, 5000, 20000]
    for questions, (margin, *stated) in table.items():
        exact = default_margin(questions)
        assert margin == pytest.approx(100 * exact, abs=0.051)
        for difference, share in zip((-exact, *DIFFERENCES), stated, strict=True):
            computed = acceptance(questions, 0.1, difference, exact)
            assert computed is not None and share == pytest.approx(100 * computed, abs=0.051)


def test_what_cannot_be_is_no_number_and_too_few_questions_accept_nothing() -> None:
    assert acceptance(100, 0.05, -0.1, 0.05) is None
    assert set(gate_rates(GateConfig(), 49).accepted[0.1].values()) == {0.0}
    assert gate_rates(GateConfig(max_regression=None), 100).accepted == {}
