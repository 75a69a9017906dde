"""Scores of answers, overall and per slice, and the score of the majority baseline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from statistics import fmean
from typing import Literal, NotRequired, TypedDict

import numpy as np

from vlmpipe.trainer.data.sample import DEFAULT_SLICE, Turn
from vlmpipe.trainer.evaluation.cider import MIN_IMAGES, Captioned, cider_d, looks_like_captions
from vlmpipe.trainer.evaluation.vqa_answers import normalise_answer

MIN_SIMILARITY = 0.5  # this and lower similarities score 0


class SliceScores(TypedDict):
    """Scores of a slice's answers in evaluate.json. None without questions."""

    questions: int
    exact_match: float | None
    vqa_accuracy: NotRequired[float | None]
    anls: NotRequired[float | None]
    cider_d: NotRequired[float | None]
    chance: NotRequired[float | None]  # of the majority baseline


class Scores(SliceScores):
    """Scores of all answers, and of each slice by its name."""

    slices: dict[str, SliceScores]


class TrainingSlice(TypedDict, total=False):
    """The training answers to a slice's questions in stats.json."""

    majority_answer: str | None
    question_answers: Mapping[str, str]  # by question, of those that training repeats


@dataclass(frozen=True)
class Question:
    """One validation question. `sample` is the number of its sample in the split."""

    sample: int
    id: str
    turn: int
    slice: str
    question: str
    answer: str
    system: str = ""
    earlier: tuple[Turn, ...] = ()  # turns before it, asked with their reference answers
    images: int | None = None  # the first ones of its sample that it sees; None: all
    image_group: str = ""  # equal for questions of samples with the same images (`image_group`)
    fields: tuple[tuple[str, str], ...] = ()  # of its record, that data.slices names


@dataclass(frozen=True)
class Prediction:
    """The model's answer to a question."""

    id: str
    turn: int
    slice: str
    question: str
    answer: str
    prediction: str
    correct: bool
    finish_reason: str = ""  # why it ends, as in OpenAI's API: stop or length
    image_group: str = ""  # of its question: answers of one group are no independent evidence
    fields: tuple[tuple[str, str], ...] = ()  # of its question

    def line(self) -> dict[str, object]:
        """Content of its line in predictions.jsonl, with fields as an object where there are any."""
        values = asdict(self)
        fields = dict(values.pop("fields"))
        return values | ({"fields": fields} if fields else {})


def image_group(sample: str, images: Sequence[str]) -> str:
    """A name of a sample's images, equal where they are the same ones; the sample's own without images.

    images: their SHA-256 digests.
    """
    if not images:
        return sample
    return images[0] if len(images) == 1 else sha256(" ".join(images).encode()).hexdigest()


def normalise(text: str) -> str:
    """Lower case, without extra white space and a final full stop."""
    return " ".join(text.lower().split()).removesuffix(".")


def is_right(answer: str, prediction: str) -> bool:
    """Return whether a prediction equals the answer after normalisation."""
    return normalise(answer) == normalise(prediction)


def exact_match(predictions: Sequence[Prediction]) -> Scores:
    """Share of right answers, overall and per slice."""
    return _by_slice((prediction.slice, prediction.correct) for prediction in predictions)


def scores(
    predictions: Sequence[Prediction],
    image_keys: Mapping[tuple[str, int], Hashable] | None = None,
    captions: Literal["auto", "on", "off"] = "off",
) -> Scores:
    """Mean exact match, VQA accuracy and ANLS, overall and per slice, and CIDEr-D of captions.

    Args:
        image_keys: image and question by a prediction's id and turn. Expected answers to the same one are references of
            one caption. Without it, each prediction has one reference.
        captions: `auto` adds `cider_d` where answers look like captions.
    """
    result = exact_match(predictions)
    groups: list[tuple[str, SliceScores]] = [("", result), *result["slices"].items()]
    for name, group in groups:
        asked = [prediction for prediction in predictions if not name or prediction.slice == name]
        group["vqa_accuracy"] = _mean_of(vqa_accuracy, asked)
        group["anls"] = _mean_of(anls, asked)
        if captions == "on" or (
            captions == "auto" and looks_like_captions([prediction.answer for prediction in asked])
        ):
            together = captioned(asked, image_keys or {})
            group["cider_d"] = fmean(cider_d(together)) if len(together) >= MIN_IMAGES else None
    return result


def _mean_of(score: Callable[[str, str], float], predictions: Sequence[Prediction]) -> float | None:
    """The mean of a score of answers and predictions; None without any."""
    return fmean(score(asked.answer, asked.prediction) for asked in predictions) if predictions else None


def captioned(predictions: Sequence[Prediction], image_keys: Mapping[tuple[str, int], Hashable]) -> list[Captioned]:
    """Each image with all its expected captions and the model's first one."""
    groups: dict[Hashable, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(
            image_keys.get((prediction.id, prediction.turn), (prediction.id, prediction.turn)), []
        ).append(prediction)
    return [
        Captioned(tuple(prediction.answer for prediction in group), group[0].prediction) for group in groups.values()
    ]


def baseline_answers(questions: Sequence[Question], slices: Mapping[str, TrainingSlice]) -> list[bool]:
    """Return whether the majority baseline is right: the most frequent training answer to this very question where
    training repeats it, else to its slice's questions.

    slices: of `stats.json`. Questions of a slice that it does not have, such as one of their text, are of the default.
    """
    from vlmpipe.trainer.data.prepare.validation.deduplicate import (
        counted_question,  # and its tables: compare needs neither
    )

    def answer(asked: Question) -> str:
        of_slice = slices.get(asked.slice) or slices.get(DEFAULT_SLICE) or TrainingSlice()
        of_question = (of_slice.get("question_answers") or {}).get(counted_question(asked.question))
        return of_question or of_slice.get("majority_answer") or ""

    return [is_right(asked.answer, answer(asked)) for asked in questions]


def majority_baseline(questions: Sequence[Question], slices: Mapping[str, TrainingSlice]) -> Scores:
    """Exact match of the majority baseline (`baseline_answers`)."""
    right = baseline_answers(questions, slices)
    return _by_slice((asked.slice, correct) for asked, correct in zip(questions, right, strict=True))


def _by_slice(scored: Iterable[tuple[str, bool]]) -> Scores:
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
    """Return the share of correct answers, or None without questions."""
    return sum(correct) / len(correct) if correct else None


def vqa_accuracy(answer: str, prediction: str) -> float:
    """1 for equal texts after the normalisation of the VQA evaluation: case, punctuation, articles and the form of
    numbers do not matter. With one reference answer instead of ten (`consensus`).
    """
    expected, predicted = (text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'") for text in (answer, prediction))
    return float(normalise_answer(expected) == normalise_answer(predicted))


def anls(answer: str, prediction: str) -> float:
    """Normalised Levenshtein similarity, 0 at one half and below: how well text was read, tolerating single letters.

    Source: Biten et al. 2019, arXiv 1905.13648, equation 1. Case and white space do not matter.
    """
    expected, read = (" ".join(text.lower().split()) for text in (answer, prediction))
    if expected == read:
        return 1.0
    longest = max(len(expected), len(read))
    if min(len(expected), len(read)) <= MIN_SIMILARITY * longest:  # the distance is the difference in length or more
        return 0.0
    similarity = 1 - levenshtein(expected, read) / longest
    return similarity if similarity > MIN_SIMILARITY else 0.0


def levenshtein(first: str, other: str) -> int:
    """Fewest insertions, deletions and replacements of characters that turn one text into the other."""
    letters, places = np.array([ord(letter) for letter in other], np.int64), np.arange(len(other) + 1)
    before = places  # distances from "" to each prefix of `other`
    for row, letter in enumerate(first, start=1):
        now = np.append(row, np.minimum(before[1:] + 1, before[:-1] + (letters != ord(letter))))
        before = np.minimum.accumulate(now - places) + places  # or an insertion
    return int(before[-1])
