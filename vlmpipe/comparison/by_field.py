"""Differences of runs on the values of the records' fields that `data.slices` names, by a paired test.

The gate's test, two-sided, by image; p values are corrected for all values of all fields and all runs (Holm).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FieldDifference:
    """Exact match of a run and the first one on the questions with one value of a field.

    difference_interval: 95 %, not corrected. p_corrected: None for too few images.
    """

    field: str
    value: str
    run: str
    questions: int
    images: int
    first: float
    this: float
    difference: float
    difference_interval: tuple[float, float]
    p_corrected: float | None
    verdict: str


@dataclass(frozen=True)
class ByField:
    """Differences by value, the largest first, and notes on fields that are left out or shown in ranges."""

    rows: tuple[FieldDifference, ...]
    notes: tuple[str, ...]


def field_differences(
    names: Sequence[str], lines: Sequence[Sequence[Mapping[str, object]]], groups: Sequence[str]
) -> ByField:
    """The differences on each value. lines: of each run, to the same questions. A question's fields are those of the
    first run that has any: data prepared before data.slices named them has none.
    """
    from vlmpipe.trainer.evaluation.significance.paired import interval, paired_counts
    from vlmpipe.trainer.evaluation.significance.slices import holm, p_of_pair
    from vlmpipe.trainer.evaluation.validation.field_slices import LEVEL
    from vlmpipe.trainer.evaluation.validation.field_values import grouped, obstacle
    from vlmpipe.trainer.records.evaluation import ranges_sentence

    members: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, of_question in enumerate(zip(*lines, strict=True)):
        fields: Mapping[str, str] = next(filter(None, (line.get("fields") for line in of_question)), {})
        for field, value in fields.items():
            members[field][value].append(number)
    notes, slices = list[str](), dict[str, dict[str, tuple[int, ...]]]()
    for field, of_values in members.items():
        if why := obstacle(of_values, len(groups)):
            notes.append(f"{field} of data.slices is left out: {why}")
            continue
        parts = grouped(of_values)
        slices[field] = {value: part.members for value, part in parts.items()}
        if ranges := sum(part.span is not None for part in parts.values()):
            notes.append(ranges_sentence(field, len(of_values), ranges))
        if without := len(groups) - sum(map(len, of_values.values())):
            notes.append(f"{without:,} questions have no {field} (data.slices), and are in none of its slices")
    pairs = {
        (field, value, place): paired_counts(
            [groups[number] for number in numbers],
            [bool(lines[place][number]["correct"]) for number in numbers],
            [bool(lines[0][number]["correct"]) for number in numbers],
        )
        for field, of_slices in slices.items()
        for value, numbers in of_slices.items()
        for place in range(1, len(names))
    }
    p_values = {key: p_of_pair(counts) for key, counts in pairs.items()}
    corrected = holm({key: p for key, p in p_values.items() if p is not None})
    rows = []
    for (field, value, place), counts in pairs.items():
        numbers, p = slices[field][value], corrected.get((field, value, place))
        verdict = "too few images" if p is None else "no difference shown"
        if p is not None and p < LEVEL:
            verdict = "better" if counts.difference > 0 else "worse"
        first, this = (
            sum(bool(lines[run][number]["correct"]) for number in numbers) / len(numbers) for run in (0, place)
        )
        rows.append(
            FieldDifference(
                field=field,
                value=value,
                run=names[place],
                questions=len(numbers),
                images=counts.images,
                first=first,
                this=this,
                difference=counts.difference,
                difference_interval=interval(counts, LEVEL / 2),
                p_corrected=p,
                verdict=verdict,
            )
        )
    rows.sort(key=lambda part: (-abs(part.difference) * part.questions, part.field, part.value, part.run))
    return ByField(tuple(rows), tuple(notes))
