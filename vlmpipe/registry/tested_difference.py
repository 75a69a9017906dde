"""A check of the gate by a test of two sides' answers to the same questions."""

from __future__ import annotations

from typing import NamedTuple

from vlmpipe.records.decision import Check
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts, interval, is_above


class TestedDifference(NamedTuple):
    """A difference of answers to the same questions, and the value that it must exceed."""

    name: str
    metric: str
    counts: PairedCounts
    threshold: float
    min_questions: int

    def check(self, sentence: str, verdicts: tuple[str, str]) -> Check:
        """The check. sentence: with places for the difference and the verdict, of which the first passes."""
        counts = self.counts
        low, high = interval(counts)
        passed = is_above(counts, self.threshold)
        of_images = f" about {counts.images:,} images" if counts.images < counts.questions else ""
        basis = f"{counts.questions:,} questions{of_images}"
        why = (
            f"{sentence.format(f'{counts.difference:+.4f}', verdicts[0] if passed else verdicts[1])} "
            f"({low:+.4f} to {high:+.4f}, each end at 5 %; {basis})"
        )
        if counts.questions < self.min_questions:
            passed = False
            why = f"{self.name} stands on {basis}, fewer than gate.min_questions, {self.min_questions}"
        return Check(
            name=self.name, metric=self.metric, value=counts.difference, threshold=self.threshold,
            interval=(low, high), questions=counts.questions, passed=passed, why=why,
        )  # fmt: skip
