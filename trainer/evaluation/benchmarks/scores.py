"""Scores of answers to a benchmark's questions, each after its published definition, with bootstrap intervals.

Every score is a function of sums over questions, so that a resample is scored from its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vlmpipe.trainer.config.benchmarks import SCORES, BenchmarkFormat
from vlmpipe.trainer.evaluation.benchmarks.captions import BLEU_COLUMNS, bleu, bleu_tally, rouge_l
from vlmpipe.trainer.evaluation.benchmarks.question import BenchmarkQuestion
from vlmpipe.trainer.evaluation.cider import cider_d_of_tokens, tokens
from vlmpipe.trainer.evaluation.metrics import anls
from vlmpipe.trainer.evaluation.significance.bootstrap import Float64Array, interval, resampled_sums
from vlmpipe.trainer.evaluation.vqa_answers import consensus

TOLERANCE = 0.05  # ChartQA: of a number, relative to the right one
CHOICE_MARKS = ".()[],:;!*#{}"
LAST_WORDS = 4  # of an answer, among which the letter of the choice is looked for
MAX_TEXT = 2  # times the characters of all choices: a longer answer is not searched for a choice's text


@dataclass(frozen=True)
class Scored:
    """The scored answers of a benchmark.

    each: the format's first score, by question; its mean is that score. None of questions that it does not count.
    tallies: (questions, columns), from whose sums `of_sums` computes all scores.
    """

    questions: Sequence[BenchmarkQuestion]
    of_questions: Sequence[float | None]
    tallies: Float64Array
    of_sums: Callable[[Float64Array], dict[str, Float64Array]]

    def scores(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.of_sums(self.tallies.sum(axis=0)).items()}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 %, by the bootstrap over images."""
        images = [question.image.name for question in self.questions]
        sums, count = resampled_sums(images, self.tallies), len(set(images))
        return {name: interval(values, count) for name, values in self.of_sums(sums).items()}

    def slices(self) -> dict[str, dict[str, float]]:
        """All scores of each slice, by its name."""
        names = np.array([question.slice for question in self.questions])
        by_name = {}
        for name in sorted(set(names.tolist())):
            tallies = self.tallies[names == name]
            values = self.of_sums(tallies.sum(axis=0))
            by_name[name] = {"questions": len(tallies), **{score: float(value) for score, value in values.items()}}
        return by_name


def score(form: BenchmarkFormat, questions: Sequence[BenchmarkQuestion], predictions: Sequence[str]) -> Scored:
    """Score the predictions, one for each question."""
    answered = list(zip(questions, predictions, strict=True))
    match form:
        case "vqav2" | "textvqa":
            return _mean(form, questions, [consensus(asked.answers, prediction) for asked, prediction in answered])
        case "docvqa":
            of_questions = [max(anls(answer, prediction) for answer in asked.answers) for asked, prediction in answered]
            return _mean(form, questions, of_questions)
        case "chartqa":
            return _mean(
                form, questions, [float(relaxed_match(asked.answers[0], prediction)) for asked, prediction in answered]
            )
        case "pope":
            return _pope(questions, predictions)
        case "mmbench":
            return _choices(questions, predictions)
        case "coco-captions":
            return _captions(questions, predictions)


def _mean(form: BenchmarkFormat, questions: Sequence[BenchmarkQuestion], of_questions: Sequence[float]) -> Scored:
    (name,) = SCORES[form]
    tallies = np.array([(value, 1.0) for value in of_questions])
    return Scored(questions, of_questions, tallies, lambda sums: {name: _ratio(sums[..., 0], sums[..., 1])})


def _ratio(part: Float64Array, whole: Float64Array) -> Float64Array:
    """0 where nothing was counted."""
    return np.divide(part, whole, out=np.zeros_like(np.asarray(part, np.float64)), where=np.asarray(whole) > 0)


# ---- POPE


def says_yes(prediction: str) -> bool:
    """POPE's reading of an answer: no where the first sentence has the word no, No or not, else yes."""
    words = prediction.split(".")[0].replace(",", "").split(" ")
    return not {"No", "not", "no"} & set(words)


def _pope(questions: Sequence[BenchmarkQuestion], predictions: Sequence[str]) -> Scored:
    pairs = [
        (asked.answers[0] == "yes", says_yes(prediction))
        for asked, prediction in zip(questions, predictions, strict=True)
    ]
    order = [(True, True), (False, True), (False, False), (True, False)]  # true and false positives, negatives
    tallies = np.array([[float(pair == cell) for cell in order] for pair in pairs])
    return Scored(questions, [float(label == prediction) for label, prediction in pairs], tallies, _of_confusion)


def _of_confusion(sums: Float64Array) -> dict[str, Float64Array]:
    right_yes, wrong_yes, right_no, wrong_no = (sums[..., column] for column in range(4))
    count = sums.sum(axis=-1)
    return {
        "accuracy": _ratio(right_yes + right_no, count),
        "precision": _ratio(right_yes, right_yes + wrong_yes),
        "recall": _ratio(right_yes, right_yes + wrong_no),
        "f1": _ratio(2 * right_yes, 2 * right_yes + wrong_yes + wrong_no),
        "yes_ratio": _ratio(right_yes + wrong_yes, count),
    }


# ---- MMBench


def chosen_letter(prediction: str, choices: Sequence[tuple[str, str]]) -> str:
    """The choice that an answer names by its letter, else by its text; "" where it names none or several.

    The rules of VLMEvalKit, with which published figures are made, before it asks a language model: the only letter of
    a choice among the words, and it is one of the last four, so that "The answer is A." counts; else the only choice
    whose text is in an answer of at most twice the choices' length. Other answers count as wrong.
    """
    words = prediction.translate(str.maketrans(CHOICE_MARKS, " " * len(CHOICE_MARKS))).split()
    named = [letter for letter, _ in choices if letter in words]
    if len(named) == 1 and words.index(named[0]) >= len(words) - LAST_WORDS:
        return named[0]
    if len(prediction) > MAX_TEXT * sum(len(text) for _, text in choices):
        return ""
    lowered = prediction.lower()
    named = [letter for letter, text in choices if text.lower() in lowered]
    return named[0] if len(named) == 1 else ""


def _choices(questions: Sequence[BenchmarkQuestion], predictions: Sequence[str]) -> Scored:
    """Accuracy counts originals; circular accuracy counts a question as right if it is so in each rotation."""
    right = [
        chosen_letter(prediction, asked.choices) == asked.answers[0]
        for asked, prediction in zip(questions, predictions, strict=True)
    ]
    of_group: dict[str, list[bool]] = {}
    for asked, is_right in zip(questions, right, strict=True):
        of_group.setdefault(asked.group, []).append(is_right)
    tallies, met = [], set[str]()
    for asked, is_right in zip(questions, right, strict=True):
        is_first, is_original = asked.group not in met, asked.id == asked.group
        met.add(asked.group)
        all_right = is_first and all(of_group[asked.group])
        tallies.append((is_original and is_right, is_original, all_right, is_first))
    has_rotations = len(of_group) < len(questions)

    def of_sums(sums: Float64Array) -> dict[str, Float64Array]:
        scores = {"accuracy": _ratio(sums[..., 0], sums[..., 1])}
        return scores | ({"circular_accuracy": _ratio(sums[..., 2], sums[..., 3])} if has_rotations else {})

    of_questions = [
        float(is_right) if asked.id == asked.group else None for asked, is_right in zip(questions, right, strict=True)
    ]
    return Scored(questions, of_questions, np.array(tallies, np.float64), of_sums)


# ---- ChartQA


def relaxed_match(answer: str, prediction: str) -> bool:
    """Numbers within 5 % of the right one, other answers equal but for case. `5%` is 0.05, and 0 is compared as text.

    Source: Masry et al. 2022, arXiv 2203.10244, section 5.1, in the form of Pix2Struct (Lee et al. 2023), which
    published figures use.
    """
    answer, prediction = answer.strip(), prediction.strip()
    right, predicted = _number(answer), _number(prediction)
    if right and predicted is not None:
        return abs(predicted - right) / abs(right) <= TOLERANCE
    return answer.lower() == prediction.lower()


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


# ---- COCO captions


def _captions(questions: Sequence[BenchmarkQuestion], predictions: Sequence[str]) -> Scored:
    pairs = [
        ([tokens(text) for text in asked.answers], tokens(prediction))
        for asked, prediction in zip(questions, predictions, strict=True)
    ]
    cider = cider_d_of_tokens(pairs)
    tallies = np.array(
        [(1.0, score, rouge_l(*pair), *bleu_tally(*pair)) for score, pair in zip(cider, pairs, strict=True)]
    )

    def of_sums(sums: Float64Array) -> dict[str, Float64Array]:
        count = sums[..., 0]
        return {
            "cider_d": _ratio(sums[..., 1], count),
            "bleu_4": bleu(sums[..., -BLEU_COLUMNS:]),
            "rouge_l": _ratio(sums[..., 2], count),
        }

    return Scored(questions, cider, tallies, of_sums)
