"""Scores of answers, overall and per slice, and what chance would give."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from trainer.evaluation.cider import LEAST_PICTURES, Captioned, cider_d, looks_like_captions
from trainer.evaluation.vqa_metrics import anls, vqa_accuracy


@dataclass(frozen=True)
class Question:
    """One held-out question. `sample` is its sample's number in the split."""

    sample: int
    id: str
    turn: int
    slice: str
    question: str
    answer: str


@dataclass(frozen=True)
class Prediction:
    """What the model answered to a question."""

    id: str
    turn: int
    slice: str
    question: str
    answer: str
    prediction: str
    correct: bool


def normalise(text: str) -> str:
    """Case, white space at the ends or doubled, and a final full stop do not matter."""
    return " ".join(text.lower().split()).removesuffix(".")


def is_right(answer: str, prediction: str) -> bool:
    """Whether a prediction counts as the answer."""
    return normalise(answer) == normalise(prediction)


def exact_match(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Share of right answers, overall and per slice."""
    return _by_slice((prediction.slice, prediction.correct) for prediction in predictions)


def scores(
    predictions: Sequence[Prediction],
    pictures: Mapping[tuple[str, int], Hashable] | None = None,
    captions: Literal["auto", "on", "off"] = "off",
) -> dict[str, Any]:
    """Exact match, and beside it VQA accuracy and ANLS: means, overall and per slice. CIDEr-D where it says something.

    Args:
        pictures: what was asked about, by a prediction's id and turn: expected answers to the same are references of
            one caption. Without it each prediction is alone.
        captions: `auto` gives `cider_d` to what looks like captions, overall and per slice.
    """
    found = exact_match(predictions)
    for name, group in (("", found), *found["slices"].items()):
        asked = [prediction for prediction in predictions if not name or prediction.slice == name]
        for metric, score in (("vqa_accuracy", vqa_accuracy), ("anls", anls)):
            group[metric] = fmean(score(one.answer, one.prediction) for one in asked) if asked else None
        if captions == "on" or (captions == "auto" and looks_like_captions([one.answer for one in asked])):
            together = captioned(asked, pictures or {})
            group["cider_d"] = fmean(cider_d(together)) if len(together) >= LEAST_PICTURES else None
    return found


def captioned(predictions: Sequence[Prediction], pictures: Mapping[tuple[str, int], Hashable]) -> list[Captioned]:
    """Each picture with all its expected captions and the first that the model gave."""
    groups: dict[Hashable, list[Prediction]] = {}
    for one in predictions:
        groups.setdefault(pictures.get((one.id, one.turn), (one.id, one.turn)), []).append(one)
    return [Captioned(tuple(one.answer for one in group), group[0].prediction) for group in groups.values()]


def overlap_sentence(evaluation: Mapping[str, Any]) -> str:
    """What belongs next to a score where training has seen validation images; empty where it has not."""
    shared, images = (evaluation.get(name) for name in ("images_also_in_train", "images"))
    if not isinstance(shared, int) or not isinstance(images, int) or not shared:
        return ""
    return f"{shared:,} of {images:,} held-out images are also in the training split"


def chance(questions: Sequence[Question], most_frequent: Mapping[str, str]) -> dict[str, Any]:
    """Share right when every question of a slice gets that slice's most frequent training answer, {slice: answer}."""
    return _by_slice((asked.slice, is_right(asked.answer, most_frequent.get(asked.slice, ""))) for asked in questions)


def _by_slice(scored: Iterable[tuple[str, bool]]) -> dict[str, Any]:
    slices: dict[str, list[bool]] = {}
    for name, correct in scored:
        slices.setdefault(name, []).append(correct)
    everything = [correct for correct_in_slice in slices.values() for correct in correct_in_slice]
    return {
        "questions": len(everything),
        "exact_match": _share(everything),
        "slices": {
            name: {"questions": len(correct), "exact_match": _share(correct)}
            for name, correct in sorted(slices.items())
        },
    }


def _share(correct: Sequence[bool]) -> float | None:
    """None for no questions: neither right nor wrong."""
    return sum(correct) / len(correct) if correct else None
