"""Part `gate`: how often the gate accepts, by simulated evaluations through `decide` itself.

Three questions: are the rates those that `vlmpipe gate` computes and docs/reference/gate.md states, for 60 to 20,000
questions; does the level hold where questions share images; and what happens to a champion's score over a year of
retrainings that are all equally good. Fails where a rate is off by more than chance.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.config.sections.output import GateConfig
from vlmpipe.records.decision import Champion
from vlmpipe.registry.acceptance import acceptance
from vlmpipe.registry.gate import AgainstChampion, decide
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts, default_margin, paired_counts
from vlmpipe.trainer.records.evaluation import Evaluation

QUESTIONS = (60, 200, 500, 1000, 2000, 5000, 20_000)
DIFFERENCES = (-0.05, -0.02, -0.01, 0.0, 0.01, 0.02, 0.05)
DIFFERING = 0.1
DEVIATIONS = 4.5  # of a simulated share, beyond which it is no chance
IMAGES = ((3, 10), (5, 10), (8, 10), (12, 10), (20, 10), (40, 5), (100, 3), (500, 4))  # images, questions of each
TOGETHER = (0.0, 0.3, 1.0)  # share of images whose questions all have one outcome
CLUSTERED_LEVEL = 0.06  # what the page states of questions that share images
CLUSTERED_DEVIATIONS = 3  # of 4,000 evaluations: 7.1 % is refused
GATE = GateConfig(min_margin_over_chance=None, max_loss=9.0, min_questions=1)
CHAMPION = Champion(version=1, run_id="champion", exact_match=0.8)


def gate(bench: Bench) -> None:
    trials = 200 if bench.quick else 2000
    chance = np.random.default_rng(0)
    for questions in QUESTIONS:
        margin = default_margin(questions)
        for difference in (-margin, *DIFFERENCES):
            bench.at(f"{questions} questions, {100 * difference:+.1f} points", 0.0)
            expected = acceptance(questions, DIFFERING, difference, margin)
            assert expected is not None
            shares = [(DIFFERING + sign * difference) / 2 for sign in (1, -1)]
            drawn = chance.multinomial(questions, [*shares, 1 - DIFFERING], trials)
            found = sum(accepts(questions, int(more), int(less)) for more, less, _ in drawn) / trials
            spread = DEVIATIONS * math.sqrt(max(expected * (1 - expected), 1e-3) / trials)
            bench.report.require(
                abs(found - expected) <= spread, f"{questions}: accepted as computed", found=f"{found:.3f}"
            )
            what = "worse by the margin" if difference == -margin else f"{100 * difference:+.0f} points"
            bench.report.figure(what, f"{questions:,} questions, 10 % differ", "share accepted", Side("gate", [found]))
    clustered(bench, chance, 2 * trials)
    a_year(bench, chance, trials // 10)


def accepts(questions: int, only_model: int, only_champion: int) -> bool:
    answers = PairedCounts(questions=questions, only_model=only_model, only_other=only_champion, images=questions)
    return accepts_answers(answers)


def accepts_answers(answers: PairedCounts) -> bool:
    evaluation = Evaluation(questions=answers.questions, loss=1.0)
    return decide(evaluation, GATE, AgainstChampion(CHAMPION, answers)).accepted


def clustered(bench: Bench, chance: np.random.Generator, trials: int) -> None:
    """A model that is worse by the margin, on images with several questions each."""
    for images, each in IMAGES:
        for together in TOGETHER:
            bench.at(f"{images} images with {each} questions, {together:.0%} as one", 0.0)
            margin, differing = default_margin(images * each), 0.2
            shares = [(differing + margin) / 2, 1 - differing, (differing - margin) / 2]
            passed = 0
            for _ in range(trials):
                drawn = chance.choice([-1, 0, 1], size=(images, each), p=shares)
                as_one = chance.random(images) < together
                drawn[as_one] = drawn[as_one][:, :1]
                groups = np.repeat(np.arange(images), each).tolist()
                passed += accepts_answers(
                    paired_counts(groups, (drawn == 1).ravel().tolist(), (drawn == -1).ravel().tolist())
                )
            found = passed / trials
            spread = CLUSTERED_DEVIATIONS * math.sqrt(CLUSTERED_LEVEL * (1 - CLUSTERED_LEVEL) / trials)
            bench.report.require(
                found <= CLUSTERED_LEVEL + spread, f"{images} x {each}: the level holds", found=f"{found:.3f}"
            )
            data = f"{images} images x {each} questions, {together:.0%} of images as one, 20 % differ"
            bench.report.figure("worse by the margin", data, "share accepted", Side("gate", [found]))


def a_year(bench: Bench, chance: np.random.Generator, years: int) -> None:
    """Nineteen retrainings of the same true score, each asked beside the champion: who is accepted, and what the
    champion's score on its questions says beyond the truth."""
    truth, weeks = 0.8, 20
    for questions in (200, 500, 2000):
        bench.at(f"{weeks} retrainings, {questions} questions", 0.0)
        accepted, drift = [], []
        for _ in range(years):
            # A question is hard or easy for all models of the year; half of what differs between two of them is noise
            # of the one, half of the other.
            easy = chance.random(questions) < truth
            answers = [np.where(chance.random(questions) < DIFFERING / 2, ~easy, easy) for _ in range(weeks)]
            champion, count = answers[0], 0
            for new in answers[1:]:
                counts = paired_counts(range(questions), new.tolist(), champion.tolist())
                if accepts_answers(counts):
                    champion, count = new, count + 1
            expected = easy.mean() * (1 - DIFFERING / 2) + (1 - easy.mean()) * DIFFERING / 2
            accepted.append(count)
            drift.append(100 * (champion.mean() - expected))
        data = f"{weeks - 1} retrainings of equal quality, {questions:,} questions"
        bench.report.figure("accepted", data, "models", Side("gate", [float(np.mean(accepted))]))
        bench.report.figure("champion's score beyond the truth", data, "points", Side("gate", [float(np.mean(drift))]))
