"""What prepared data holds, in numbers: lengths, slices, how well rows fill, and what a guess would score."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from trainer.config import DataConfig
from trainer.data.index import Index, SplitIndex
from trainer.data.rows import plan_rows
from trainer.data.samples import SPLITS, Split, Turn

LONGEST_COUNTED_ANSWER = 64  # characters; a longer answer is never the most frequent one, and counting all takes memory
PERCENTILES = (5, 50, 95, 100)


class AnswerCounts:
    """How often each answer is given, by split and slice."""

    def __init__(self) -> None:
        self._questions: Counter[tuple[Split, str]] = Counter()
        self._answers: dict[tuple[Split, str], Counter[str]] = defaultdict(Counter)

    def add(self, split: Split, turns: Iterable[Turn]) -> None:
        for turn in turns:
            self._questions[split, turn.slice] += 1
            if len(turn.answer) <= LONGEST_COUNTED_ANSWER:
                self._answers[split, turn.slice][turn.answer] += 1

    def slices(self) -> dict[str, Any]:
        """For each slice: questions, the most frequent training answer, and the held-out share it is right for."""
        found = {}
        for name in sorted({name for _, name in self._questions}):
            # Of equally frequent answers the first in the alphabet, so that the order of samples does not matter.
            answers = sorted(self._answers["train", name].items(), key=lambda item: (-item[1], item[0]))
            majority = answers[0][0] if answers else None
            held_out = self._questions["eval", name]
            right = self._answers["eval", name][majority] if majority is not None else 0
            found[name] = {
                "train_questions": self._questions["train", name],
                "eval_questions": held_out,
                "majority_answer": majority,
                "chance": right / held_out if held_out else None,
            }
        return found


def describe(index: Index, answers: AnswerCounts, config: DataConfig) -> dict[str, Any]:
    """The content of `stats.json`."""
    images = {name: {sha256 for sha256, _ in index.split(name).images()} for name in SPLITS}
    return {
        "splits": {name: _describe_split(index.split(name), len(images[name]), config) for name in SPLITS},
        "slices": answers.slices(),
        # Not a fault by itself, but a held-out score on pictures that were trained on means less.
        "eval_images_also_in_train": len(images["eval"] & images["train"]),
    }


def _describe_split(split: SplitIndex, unique_images: int, config: DataConfig) -> dict[str, Any]:
    row_tokens, row_images = config.row_tokens, config.row_images
    plan = plan_rows(split.tokens, split.image_count, row_tokens=row_tokens, row_images=row_images, seed=0, epoch=0)
    lengths = np.percentile(split.tokens, PERCENTILES) if len(split) else np.zeros(len(PERCENTILES))
    return {
        "samples": len(split),
        "turns": int(split.turns.sum()),
        "images": int(split.image_count.sum()),
        "unique_images": unique_images,
        "tokens": int(split.tokens.sum()),
        "label_tokens": int(split.label_tokens.sum()),
        "sample_tokens_percentiles": {str(p): round(float(v), 1) for p, v in zip(PERCENTILES, lengths, strict=True)},
        "packed_rows": len(plan),
        "packed_fill": round(plan.fill, 4),
        "unpacked_fill": round(float(split.tokens.mean()) / row_tokens, 4) if len(split) else 0.0,
    }
