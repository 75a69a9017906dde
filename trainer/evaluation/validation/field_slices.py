"""Answers by the values of the records' fields that `data.slices` names.

Preparation stores the values in each turn of a sample, since training, which maps the index, never reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from vlmpipe.trainer.evaluation.metrics import Prediction
from vlmpipe.trainer.evaluation.significance.paired import share_interval
from vlmpipe.trainer.evaluation.significance.slices import holm, p_of_slice
from vlmpipe.trainer.evaluation.validation.field_values import ValueGroup, grouped, obstacle
from vlmpipe.trainer.records.evaluation import FieldSlice, FieldSlices

LEVEL = 0.05


def field_slices(fields: Sequence[str], predictions: Sequence[Prediction]) -> dict[str, FieldSlices]:
    """The slices of each field. p values are corrected for all slices of all fields."""
    members: dict[str, dict[str, list[int]]] = {name: defaultdict(list) for name in fields}
    for number, prediction in enumerate(predictions):
        for name, value in prediction.fields:
            if name in members:
                members[name][value].append(number)
    obstacles = {name: obstacle(of_values, len(predictions)) for name, of_values in members.items()}
    shown = {name: grouped(of_values) for name, of_values in members.items() if not obstacles[name]}
    groups, right = [asked.image_group for asked in predictions], [asked.correct for asked in predictions]
    p_values = {
        (name, value): p_of_slice(groups, right, [number in inside for number in range(len(right))])
        for name, groups_of in shown.items()
        for value, inside in ((value, set(group.members)) for value, group in groups_of.items())
    }
    corrected = holm({key: p for key, p in p_values.items() if p is not None})
    errors = len(right) - sum(right)

    def sliced(name: str, value: str, group: ValueGroup) -> FieldSlice:
        of_group, images = [right[number] for number in group.members], [groups[number] for number in group.members]
        wrong, share = len(of_group) - sum(of_group), sum(of_group) / len(of_group)
        p = corrected.get((name, value))
        rest = (sum(right) - sum(of_group)) / max(1, len(right) - len(of_group))
        verdict = "too few images" if p is None else "no difference shown"
        if p is not None and p < LEVEL:
            verdict = "worse" if share < rest else "better"
        return FieldSlice(
            value=value,
            span=group.span,
            questions=len(of_group),
            images=len(set(images)),
            errors=wrong,
            exact_match=share,
            exact_match_interval=share_interval(images, of_group),
            share_of_errors=wrong / errors if errors else 0.0,
            p_corrected=p,
            verdict=verdict,
        )

    by_field = {}
    for name, of_values in members.items():
        slices = [sliced(name, value, group) for value, group in shown.get(name, {}).items()]
        by_field[name] = FieldSlices(
            values=len(of_values),
            without=len(predictions) - sum(map(len, of_values.values())),
            obstacle=obstacles[name],
            slices=tuple(sorted(slices, key=lambda part: (-part.errors, part.value))),
        )
    return by_field
