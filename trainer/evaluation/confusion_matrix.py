"""Confusion matrices for slices with few distinct answers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from vlmpipe.trainer.evaluation.metrics import Prediction, normalise
from vlmpipe.trainer.records.evaluation import Evaluation

MAX_ANSWERS = 25  # of a readable table
# Questions of each answer of a closed set, at least and on average.
MIN_QUESTIONS, MEAN_QUESTIONS = 2, 5
RULE = (
    f"2 to {MAX_ANSWERS} different expected answers, each of {MIN_QUESTIONS} validation questions or more, and of "
    f"{MEAN_QUESTIONS} on average"
)
OTHER = "other"


@dataclass(frozen=True)
class Confusion:
    """`counts[i][j]` questions with the expected answer i were answered with j.

    The columns are the answers and, if there are other predictions, one column for all of these.
    """

    answers: tuple[str, ...]
    columns: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def questions(self) -> int:
        return sum(map(sum, self.counts))

    @property
    def is_closed(self) -> bool:
        """Return whether the answers look like a closed set."""
        fewest = min(map(sum, self.counts))
        return fewest >= MIN_QUESTIONS and self.questions >= MEAN_QUESTIONS * len(self.answers)

    def square(self) -> tuple[list[str], list[list[int]]]:
        """Names and rows of a square table: other predictions get an empty row."""
        rows = [list(row) for row in self.counts]
        return list(self.columns), rows + [[0] * len(self.columns)] * (len(self.columns) - len(rows))


def confusion_of(pairs: Iterable[tuple[str, str]]) -> Confusion | None:
    """The table of (expected, predicted) texts, normalised as for exact match.

    None unless there are 2 to MAX_ANSWERS different expected answers.
    """
    plain = [(normalise(answer), normalise(prediction)) for answer, prediction in pairs]
    asked = Counter(answer for answer, _ in plain)
    if not 2 <= len(asked) <= MAX_ANSWERS:
        return None
    answers = tuple(sorted(asked, key=_natural))
    strays = OTHER
    while strays in asked:
        strays = f"({strays})"
    counts = Counter((answer, predicted if predicted in asked else strays) for answer, predicted in plain)
    columns = (*answers, strays) if any(predicted == strays for _, predicted in counts) else answers
    rows = tuple(tuple(counts[answer, predicted] for predicted in columns) for answer in answers)
    return Confusion(answers, columns, rows)


def confusions(predictions: Sequence[Prediction]) -> dict[str, object]:
    """The part of evaluate.json: a table per slice, the `shown` one for the console, and a `note` about it.

    The shown table has the most answers, then the most questions.
    """
    by_slice: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for prediction in predictions:
        by_slice[prediction.slice].append((prediction.answer, prediction.prediction))
    matrices = {
        name: table
        for name, pairs in sorted(by_slice.items())
        if (table := confusion_of(pairs)) is not None and table.is_closed
    }
    shown = max(matrices, key=lambda name: (len(matrices[name].answers), matrices[name].questions), default=None)
    if shown is None:
        note = f"no confusion matrix: no slice has {RULE}"
    else:
        others = [name for name in matrices if name != shown]
        more = f"; evaluate.json also has those of {', '.join(others)}" if others else ""
        note = f"answers of slice {shown}, which has {RULE}{more}"
    return {"shown": shown, "note": note, "slices": {name: asdict(table) for name, table in matrices.items()}}


def shown_confusion(evaluation: Evaluation) -> tuple[Confusion | None, str]:
    """The table to show of an evaluation, and the note about it."""
    content = evaluation.confusion
    if content is None:
        return None, "no confusion matrix was evaluated"
    if content.shown is None:
        return None, content.note
    table = content.slices[content.shown]
    return Confusion(table.answers, table.columns, table.counts), content.note


def _natural(text: str) -> tuple[int, float, str]:
    """Sort key: numbers by value, then words by alphabet."""
    return (0, float(text), "") if text.isascii() and text.isdigit() else (1, 0.0, text)
