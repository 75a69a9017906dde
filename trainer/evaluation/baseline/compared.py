"""Right answers before and after training, overall and by slice, by the gate's paired test.

p values of slices are corrected for their number (Holm), and questions about one image count together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vlmpipe.trainer.evaluation.baseline.probe import Probe
from vlmpipe.trainer.evaluation.metrics import Prediction
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts, interval, paired_counts
from vlmpipe.trainer.evaluation.significance.slices import holm, p_of_pair
from vlmpipe.trainer.evaluation.validation.field_slices import LEVEL
from vlmpipe.trainer.evaluation.validation.field_values import grouped, obstacle
from vlmpipe.trainer.records.evaluation import Retention, StartScores, StartSlice

Slices = dict[tuple[str, str], list[int]]  # numbers of questions by field and value


@dataclass(frozen=True)
class BeforeAfter:
    """Right and wrong answers of start and trained weights to each question. groups: the questions' images."""

    groups: Sequence[str]
    before: Sequence[bool]
    after: Sequence[bool]

    def counts(self, numbers: Sequence[int] | None = None) -> PairedCounts:
        chosen = range(len(self.groups)) if numbers is None else numbers
        groups = [self.groups[number] for number in chosen]
        return paired_counts(
            groups, [self.after[number] for number in chosen], [self.before[number] for number in chosen]
        )

    def shares(self, numbers: Sequence[int] | None = None) -> tuple[float, float]:
        chosen = range(len(self.groups)) if numbers is None else numbers
        before, after = (sum(right[n] for n in chosen) / max(1, len(chosen)) for right in (self.before, self.after))
        return before, after

    def slices(self, members: Slices) -> tuple[StartSlice, ...]:
        """Return the slices, those with the most changed answers first."""
        pairs = {key: self.counts(numbers) for key, numbers in members.items()}
        p_values = {key: p_of_pair(counts) for key, counts in pairs.items()}
        corrected = holm({key: p for key, p in p_values.items() if p is not None})
        rows = []
        for (field, name), counts in pairs.items():
            p, (before, after) = corrected.get((field, name)), self.shares(members[field, name])
            verdict = "too few images" if p is None else "no difference shown"
            if p is not None and p < LEVEL:
                verdict = "better" if counts.difference > 0 else "worse"
            rows.append(
                StartSlice(
                    field=field,
                    name=name,
                    questions=counts.questions,
                    images=counts.images,
                    before=before,
                    after=after,
                    interval=interval(counts, LEVEL / 2),
                    p_corrected=p,
                    verdict=verdict,
                )
            )
        return tuple(sorted(rows, key=lambda part: (-abs(part.difference) * part.questions, part.field, part.name)))


def gained(predictions: Sequence[Prediction], before: Sequence[bool], fields: Sequence[str]) -> StartScores:
    """The scores on validation questions. before: of the start weights, in the order of the predictions."""
    pairs = BeforeAfter([asked.image_group for asked in predictions], before, [asked.correct for asked in predictions])
    counts, shares = pairs.counts(), pairs.shares()
    return StartScores(
        questions=counts.questions,
        images=counts.images,
        before=shares[0],
        after=shares[1],
        interval=interval(counts),
        paired=counts.model_dump(),
        slices=pairs.slices(_members(predictions, fields)),
    )


def retained(probe: Probe, start: Sequence[str], trained: Sequence[str]) -> Retention:
    """The answers that training has left."""
    if probe.obstacle:
        return Retention(obstacle=probe.obstacle)
    pairs = BeforeAfter(probe.images, *probe.right_answers(start, trained))
    counts, shares = pairs.counts(), pairs.shares()
    members: Slices = defaultdict(list)
    for number, part in enumerate(probe.parts):
        members["", part].append(number)
    return Retention(
        form=probe.form,
        questions=counts.questions,
        images=counts.images,
        before=shares[0],
        after=shares[1],
        interval=interval(counts),
        paired=counts.model_dump(),
        parts=pairs.slices(members),
    )


def _members(predictions: Sequence[Prediction], fields: Sequence[str]) -> Slices:
    """Slices of records and of fields that have several values, and not too many."""
    values: dict[str, dict[str, list[int]]] = {name: defaultdict(list) for name in ("", *fields)}
    for number, prediction in enumerate(predictions):
        for field, value in (("", prediction.slice), *prediction.fields):
            if field in values:
                values[field][value].append(number)
    by_record = values.pop("")
    slices: Slices = {("", name): numbers for name, numbers in by_record.items() if len(by_record) > 1}
    for field, of_values in values.items():
        if not obstacle(of_values, len(predictions)):
            slices |= {(field, name): list(group.members) for name, group in grouped(of_values).items()}
    return slices
