"""Answers by the values of the records' fields that `data.slices` names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from vlmpipe.trainer.evaluation.metrics import Prediction
from vlmpipe.trainer.evaluation.significance.paired import share_interval
from vlmpipe.trainer.evaluation.significance.slices import holm, p_of_slice
from vlmpipe.trainer.records.evaluation import FieldSlice, FieldSlices

MAX_VALUES = 50  # of a field; more are identifiers or measurements
LEVEL = 0.05


def field_slices(fields: Sequence[str], predictions: Sequence[Prediction]) -> dict[str, FieldSlices]:
    """The slices of each field. p values are corrected for all slices of all fields."""
    members: dict[str, dict[str, list[int]]] = {name: defaultdict(list) for name in fields}
    for number, prediction in enumerate(predictions):
        for name, value in prediction.fields:
            if name in members:
                members[name][value].append(number)
    obstacles = {name: _obstacle(of_values, len(predictions)) for name, of_values in members.items()}
    shown = {name: of_values for name, of_values in members.items() if not obstacles[name]}
    groups, right = [asked.image_group for asked in predictions], [asked.correct for asked in predictions]
    p_values = {
        (name, value): p_of_slice(groups, right, [number in inside for number in range(len(right))])
        for name, of_values in shown.items()
        for value, inside in ((value, set(numbers)) for value, numbers in of_values.items())
    }
    corrected = holm({key: p for key, p in p_values.items() if p is not None})
    errors = len(right) - sum(right)

    def sliced(name: str, value: str, numbers: Sequence[int]) -> FieldSlice:
        own, images = [right[number] for number in numbers], [groups[number] for number in numbers]
        wrong, share = len(own) - sum(own), sum(own) / len(own)
        p = corrected.get((name, value))
        rest = (sum(right) - sum(own)) / max(1, len(right) - len(own))
        verdict = "too few images" if p is None else "no difference shown"
        if p is not None and p < LEVEL:
            verdict = "worse" if share < rest else "better"
        return FieldSlice(
            value=value,
            questions=len(own),
            images=len(set(images)),
            errors=wrong,
            exact_match=share,
            exact_match_interval=share_interval(images, own),
            share_of_errors=wrong / errors if errors else 0.0,
            p_corrected=p,
            verdict=verdict,
        )

    by_field = {}
    for name, of_values in members.items():
        slices = [sliced(name, value, numbers) for value, numbers in shown.get(name, {}).items()]
        by_field[name] = FieldSlices(
            values=len(of_values),
            without=len(predictions) - sum(map(len, of_values.values())),
            obstacle=obstacles[name],
            slices=tuple(sorted(slices, key=lambda part: (-part.errors, part.value))),
        )
    return by_field


def _obstacle(of_values: dict[str, list[int]], questions: int) -> str:
    """Why a field gives no slices; empty where it does."""
    if not of_values:
        return "no validation question has a text, a number or true or false in it"
    if len(of_values) == 1:
        return f"all questions that have it have one value, {next(iter(of_values))[:80]!r}"
    if len(of_values) > MAX_VALUES:
        more = f"more than {MAX_VALUES}: name one with fewer"
        return f"it has {len(of_values):,} values in {questions:,} questions, {more}"
    return ""
