"""How often a learning curve holds the truth, simulated, and the hidden largest share of built-in sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.comparison.curve.curve import Points, fitted_laws, points_of, predicted
from vlmpipe.comparison.sweep.results import Training

SHARES, SAMPLES, QUESTIONS = (0.05, 0.1, 0.2, 0.4, 1.0), 2000, 300
SPREAD = 0.01  # standard deviation between the true scores of starts
LAWS = {  # error of a number of samples
    "floor 0.05, exponent 0.5": lambda samples: 0.05 + 0.5 * (samples / 100) ** -0.5,
    "floor 0.1, exponent 1": lambda samples: 0.1 + 0.6 * (samples / 100) ** -1.0,
    "floor 0, exponent 0.3": lambda samples: 0.6 * (samples / 100) ** -0.3,
}
SETS = {
    "digits": ["configs/digits.yaml", "data.max_samples=2400"],
    "easy-vqa": ["configs/easy-vqa.yaml", "data.max_samples=4000"],
    "openmoji": ["configs/openmoji.yaml", "train.epochs=5", "--metric", "anls"],
}


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
    """A quarter of an hour of CPU time: `vlmpipe curve` on three sets."""
    for name, arguments in SETS.items():
        bench.at(name, 0.0)
        fixed = ["train.micro_batch_size=4", "evaluate.controls=[]", "gate=none", f"output.root_uri={bench.scratch}"]
        command = [sys.executable, "-m", "vlmpipe", "curve", *arguments, *fixed, "--seeds", "2", "--json"]
        ended = subprocess.run(
            command, capture_output=True, encoding="utf-8", env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        answered = json.loads(ended.stdout)["curve"]
        checked = answered["checked"]
        inside = checked and checked["score"]["low"] <= checked["measured"] <= checked["score"]["high"]
        bench.report.figure(
            "hidden largest share inside 80 %",
            f"{name}: {answered['answer']}",
            "share",
            Side("curve", [float(bool(inside))]),
        )
