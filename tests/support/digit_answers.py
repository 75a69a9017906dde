"""Samples of two digit scans each, the answers of a real classifier, and how they are evaluated."""

from __future__ import annotations

import functools
import io
import math
from collections import Counter
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

NUM_EVAL = 120
LEFT, RIGHT, SUM, EVEN = "left digit", "right digit", "sum", "even or odd"
QUESTIONS = {
    LEFT: "Which digit is on the left?",
    RIGHT: "Which digit is on the right?",
    SUM: "What is the sum of the two digits?",
    EVEN: "Is the left digit even?",
}


@functools.cache
def digit_pairs() -> tuple[list[tuple[int, int, bytes]], np.ndarray, np.ndarray]:
    """(left, right, PNG) of each held-out picture, and a classifier's guesses of both digits: not to be changed."""
    digits = load_digits()
    model = LogisticRegression(max_iter=60).fit(digits.data[:260] / 16, digits.target[:260])
    left = np.arange(500, 500 + NUM_EVAL)
    right = left + NUM_EVAL
    pairs = []
    for a, b in zip(left, right, strict=True):
        scans = np.hstack([digits.images[a], np.zeros((8, 2)), digits.images[b]])
        picture = Image.fromarray((scans * 15.9).astype(np.uint8)).resize((72, 32), Image.Resampling.NEAREST)
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        pairs.append((int(digits.target[a]), int(digits.target[b]), buffer.getvalue()))
    return pairs, model.predict(digits.data[left] / 16), model.predict(digits.data[right] / 16)


def answers_of(left: int, right: int) -> dict[str, str]:
    return {LEFT: str(left), RIGHT: str(right), SUM: str(left + right), EVEN: "no" if left % 2 else "yes"}


def sample_of(number: int, left: int, right: int) -> dict[str, Any]:
    turns = [
        {"question": ("<image>\n" if turn == 0 else "") + QUESTIONS[name], "answer": answer, "slice": name}
        for turn, (name, answer) in enumerate(answers_of(left, right).items())
    ]
    return {"id": f"digits/{number:04d}", "turns": turns}


def predictions_of(samples: list[dict[str, Any]], left: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    lines = []
    for sample, a, b in zip(samples, left, right, strict=True):
        guesses = answers_of(int(a), int(b))
        for number, turn in enumerate(sample["turns"]):
            prediction = guesses[turn["slice"]]
            lines.append(
                {
                    "id": sample["id"],
                    "turn": number,
                    **turn,
                    "prediction": prediction,
                    "correct": prediction == turn["answer"],
                }
            )
    return lines


def evaluation_of(
    predictions: list[dict[str, Any]], shuffled: list[dict[str, Any]], nothing: list[dict[str, Any]]
) -> dict[str, Any]:
    def share(lines: list[dict[str, Any]]) -> float:
        return sum(line["correct"] for line in lines) / len(lines)

    def of(name: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line for line in lines if line["slice"] == name]

    def chance(name: str) -> float:
        lines = of(name, predictions)
        return Counter(line["answer"] for line in lines).most_common(1)[0][1] / len(lines)

    def control(lines: list[dict[str, Any]]) -> dict[str, Any]:
        slices = {name: {"exact_match": share(of(name, lines))} for name in QUESTIONS}
        return {"exact_match": share(lines), "slices": slices}

    slices = {
        name: {
            "questions": len(of(name, predictions)),
            "exact_match": share(of(name, predictions)),
            "chance": chance(name),
        }
        for name in QUESTIONS
    }
    return {
        "samples": NUM_EVAL,
        "held_out_sha256": "d",
        "questions": len(predictions),
        "loss": 0.412,
        "perplexity": math.exp(0.412),
        "exact_match": share(predictions),
        "chance": sum(measured["chance"] for measured in slices.values()) / len(slices),
        "slices": slices,
        "controls": {"shuffled_image": control(shuffled), "no_image": control(nothing)},
        "wall_s": 9.4,
    }
