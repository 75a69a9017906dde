"""Slices of the fields that data.slices names, by what they cost, with images of their wrong answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmpipe.report.samples import PreparedImages, sample_cards, spread
from vlmpipe.trainer.evaluation.validation.field_values import holds
from vlmpipe.trainer.records.evaluation import Evaluation

SHOWN_WRONG = 10  # of a slice
SLICES_WITH_IMAGES = 12  # those with the most errors: the page stays small


def field_rows(
    evaluation: Evaluation, predictions: Sequence[dict[str, Any]], images: PreparedImages | None
) -> list[dict[str, object]]:
    """A line for each value of each field, the largest share of the errors first, with cards of wrong answers."""
    slices = [(field, part) for field, of_field in evaluation.by_field.items() for part in of_field.slices]
    slices.sort(key=lambda pair: (-pair[1].errors, pair[0], pair[1].value))
    rows: list[dict[str, object]] = []
    for place, (field, part) in enumerate(slices):
        wrong = [
            line
            for line in predictions
            if not line.get("correct") and holds(part.value, part.span, (line.get("fields") or {}).get(field))
        ]
        chosen = spread(wrong, SHOWN_WRONG) if images and place < SLICES_WITH_IMAGES else []
        rows.append({"field": field, "slice": part, "cards": sample_cards(images, chosen) if images and chosen else []})
    return rows
