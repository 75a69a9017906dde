"""How often a learning curve holds the truth, simulated, and the hidden largest share of built-in sets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.comparison.curve.curve import Points, fitted_laws, points_of, predicted
from vlmpipe.comparison.sweep.results import Training
from vlmpipe.records.learning_curve import Between, LearningCurve
from vlmpipe.trainer.storage import open_storage

SHARES, SAMPLES, QUESTIONS = (0.05, 0.1, 0.2, 0.4, 1.0), 2000, 300
SPREAD = 0.01  # standard deviation between the true scores of starts
LAWS = {  # error of a number of samples
    "floor 0.05, exponent 0.5": lambda samples: 0.05 + 0.5 * (samples / 100) ** -0.5,
    "floor 0.1, exponent 1": lambda samples: 0.1 + 0.6 * (samples / 100) ** -1.0,
    "floor 0, exponent 0.3": lambda samples: 0.6 * (samples / 100) ** -0.3,
}
SETS = {  # with equal steps: with equal epochs of so few samples, small shares learn nothing
    "digits": (
        *("configs/digits.yaml", "data.max_samples=1000", "data.sequence_length=128", "train.micro_batch_size=2"),
        *("train.global_batch_size=2", "train.epochs=200", "train.max_steps=2400", "--shares", "10,20,40,100"),
    ),
    "easy-vqa": (  # 10 % is not above the majority baseline
        *("configs/easy-vqa.yaml", "data.max_samples=800", "data.sequence_length=256", "train.micro_batch_size=4"),
        *("train.epochs=60", "train.max_steps=600", "--shares", "20,40,70,100"),
    ),
    "openmoji": (
        *("configs/openmoji.yaml", "data.max_samples=1500", "data.sequence_length=128", "train.micro_batch_size=4"),
        *("train.epochs=60", "train.max_steps=500", "--shares", "10,20,40,100", "--metric", "anls"),
    ),
}
SIDE_BY_SIDE = 2
FIXED = (
    "train.validate_every_steps=0",
    "evaluate.max_samples=150",
    "cluster.env={OMP_NUM_THREADS: '1'}",
)


def curve(bench: Bench) -> None:
    trials, chance = 4 if bench.quick else 40, np.random.default_rng(0)
    for name, law in LAWS.items():
        for starts in (1, 3):
            bench.at(f"{name}, {starts} starts", 0.0)
            hidden, far = np.mean([trial(chance, law, starts) for _ in range(trials)], axis=0)
            data = f"{name}, {starts} starts with {100 * SPREAD:.0f} point of spread, {QUESTIONS} questions"
            bench.report.figure("hidden largest share inside 80 %", data, "share", Side("curve", [float(hidden)]))
            bench.report.figure("truth at 4 times the samples inside 80 %", data, "share", Side("curve", [float(far)]))


def trial(chance: np.random.Generator, law: Callable[[float], float], starts: int) -> tuple[bool, bool]:
    """Whether intervals hold the measured largest share, hidden, and the true score at four times the samples."""
    points = simulated(chance, law, starts)
    known = points.some(range(len(SHARES) - 1))
    hidden = predicted(fitted_laws(known), known, float(SAMPLES), starts=starts).score
    far = predicted(fitted_laws(points), points, 4.0 * SAMPLES, starts=10**9).score
    is_hidden_inside = hidden.low <= points.means[-1] <= (hidden.high or 1.0)
    return bool(is_hidden_inside), far.low <= 1 - law(4 * SAMPLES) <= (far.high or 1.0)


def simulated(chance: np.random.Generator, law: Callable[[float], float], starts: int) -> Points:
    """Answers to the same questions, most of which are hard or easy for all trainings alike."""
    hard, trainings = chance.random(QUESTIONS), dict[str, list[Training]]()
    for share in SHARES:
        for start in range(starts):
            rate = np.clip(law(SAMPLES * share) + chance.normal(0, SPREAD), 0, 1)
            wrong = np.where(chance.random(QUESTIONS) < 0.3, chance.random(QUESTIONS) < rate, hard < rate)
            scores: dict[Any, float] = {
                (f"s{place}", 0, "q", "a"): float(not is_wrong) for place, is_wrong in enumerate(wrong)
            }
            trainings.setdefault(str(share), []).append(Training(str(share), start, "", scores=scores))
    return points_of(trainings, {str(share): SAMPLES * share for share in SHARES})


def curve_sets(bench: Bench) -> None:
    """Some half an hour of CPU time: `vlmpipe curve` on three sets, two side by side, as no figure is a time."""
    bench.at("three sets", 0.0)
    small = ["data.max_samples=200", "train.max_steps=20"] if bench.quick else []

    def ended(name: str) -> subprocess.CompletedProcess[str]:
        fixed = [*FIXED, *small, f"output.root_uri={bench.scratch}", "--run-id", name, "--seeds", "2", "--goal", "0.9"]
        command = [sys.executable, "-m", "vlmpipe", "curve", *SETS[name], *fixed]
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        processes = dict(zip(SETS, pool.map(ended, SETS), strict=True))
    for name, process in processes.items():
        if process.returncode:
            bench.report.note(f"{name}: no curve, exit code {process.returncode}: {process.stderr[-500:]}")
            continue
        answered = LearningCurve.read(open_storage(str(bench.scratch / "runs" / name)))
        scores = ", ".join(f"{point.samples:,.0f}: {_score(point.score)}" for point in answered.points)
        bench.report.note(f"{name}, {answered.metric}, baseline {answered.baseline}: {scores}; {answered.decision}")
        checked = answered.checked
        if checked is None or checked.measured is None:
            bench.report.note(f"{name}: the largest share is not predicted, as fewer than 3 others are fitted")
            continue
        bench.report.note(f"{name}: {_score(checked.score)} is predicted, {checked.measured:.3f} measured")
        bench.report.figure(
            "hidden largest share inside 80 %", name, "share", Side("curve", [float(bool(checked.is_inside))])
        )


def _score(score: Between | None) -> str:
    return f"{score.value:.3f} ({score.low:.3f} to {score.high or 1.0:.3f})" if score else "none"
