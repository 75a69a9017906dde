"""Scores a SavedModel on the validation questions: the figures that vlmpipe's gate reads.

Beside the share of right answers stand two that a model must beat: each question's most frequent training answer
(`chance`), and the model's own answers when it sees the image of another sample (`shuffled_image`).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import tensorflow as tf
from questions import read_questions

BATCH = 256


def answers_of(model: tf.Module, images: np.ndarray, questions: np.ndarray) -> np.ndarray:
    serve = model.signatures["serving_default"]
    parts = [
        serve(images=tf.constant(images[at : at + BATCH]), questions=tf.constant(questions[at : at + BATCH]))
        for at in range(0, len(images), BATCH)
    ]
    return np.concatenate([part["answers"].numpy() for part in parts])


def max_frequent_answers(data: Path) -> dict[bytes, bytes]:
    counts: dict[bytes, Counter[bytes]] = defaultdict(Counter)
    for _, question, answer in read_questions(data, "train").as_numpy_iterator():
        counts[question][answer] += 1
    return {question: answers.most_common(1)[0][0] for question, answers in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "data", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    images, questions, expected = (
        np.array(column, dtype=object)
        for column in zip(*read_questions(given.data, "validation").as_numpy_iterator(), strict=True)
    )
    model = tf.saved_model.load(str(given.model))
    # By half of them: neighbours are questions about one image.
    others = np.roll(images, len(images) // 2)
    guesses = max_frequent_answers(given.data)
    figures = {
        "questions": len(questions),
        "exact_match": float(np.mean(answers_of(model, images, questions) == expected)),
        "chance": float(np.mean([guesses.get(one) == answer for one, answer in zip(questions, expected, strict=True)])),
        "controls": {
            "shuffled_image": {"exact_match": float(np.mean(answers_of(model, others, questions) == expected))}
        },
    }
    (given.output / "evaluate.json").write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
