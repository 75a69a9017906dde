"""Values of a field as slices: each value is one, but many different numbers are in ranges."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_VALUES = 50  # slices of a field; more are identifiers
MAX_NUMBERS = 12  # different ones that are slices of their own; more are measurements
NUM_RANGES = 4
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class ValueGroup:
    """Questions of one slice. span: lowest and highest number of a range; None of a single value."""

    members: tuple[int, ...]
    span: tuple[float, float] | None = None


def number_of(value: str) -> float | None:
    """The finite number that a value is; None of others, such as nan."""
    number = float(value) if _NUMBER.fullmatch(value) else math.inf
    return number if math.isfinite(number) else None


def holds(name: str, span: tuple[float, float] | None, value: str | None) -> bool:
    """Return whether a question with this value of the field is in the slice of that name."""
    number = None if value is None else number_of(value)
    return value == name or (span is not None and number is not None and span[0] <= number <= span[1])


def grouped(of_values: Mapping[str, Sequence[int]]) -> dict[str, ValueGroup]:
    """The slices of a field by name. of_values: its questions by value.

    More than MAX_NUMBERS different numbers are in up to NUM_RANGES ranges, cut between two numbers where the questions
    come nearest to equal shares: equal numbers are never apart, and the order of the questions changes nothing. Values
    that are no numbers stay slices of their own.
    """
    numbers = {value: number for value in of_values if (number := number_of(value)) is not None}
    if len(set(numbers.values())) <= MAX_NUMBERS:
        return {value: ValueGroup(tuple(members)) for value, members in of_values.items()}
    texts: dict[float, list[str]] = defaultdict(list)
    for value, number in numbers.items():
        texts[number].append(value)
    ordered = sorted(texts)
    groups = {value: ValueGroup(tuple(members)) for value, members in of_values.items() if value not in numbers}
    for chosen in _cut(ordered, [sum(len(of_values[value]) for value in texts[number]) for number in ordered]):
        low, high = (min(texts[number], key=lambda text: (len(text), text)) for number in (chosen[0], chosen[-1]))
        name = low if len(chosen) == 1 else f"{low} to {high}"
        members = sorted(member for number in chosen for value in texts[number] for member in of_values[value])
        if name in groups:  # a record has the same range as a text
            members = sorted([*members, *groups[name].members])
        groups[name] = ValueGroup(tuple(members), (chosen[0], chosen[-1]))
    return groups


def obstacle(of_values: Mapping[str, Sequence[int]], questions: int) -> str:
    """Reason why a field gives no slices; empty where it does. questions: all of them."""
    if not of_values:
        return "no validation question has a text, a number or true or false in it"
    if len(of_values) == 1:
        return f"all questions that have it have one value, {next(iter(of_values))[:80]!r}"
    if len(grouped(of_values)) > MAX_VALUES:
        more = f"more than {MAX_VALUES} slices: name one with fewer"
        return f"it has {len(of_values):,} values in {questions:,} questions, {more}"
    return ""


def _cut(ordered: Sequence[float], counts: Sequence[int]) -> list[Sequence[float]]:
    """Numbers in ascending order in up to NUM_RANGES parts. counts: questions with each."""
    before, total = [0], sum(counts)
    for count in counts:
        before.append(before[-1] + count)
    ends = {
        min(range(1, len(ordered)), key=lambda end: abs(NUM_RANGES * before[end] - part * total))
        for part in range(1, NUM_RANGES)
    }
    edges = [0, *sorted(ends), len(ordered)]
    return [ordered[start:end] for start, end in pairwise(edges)]
