"""Content of evaluate.json on validation questions: scores, controls, the champion, and answers that were cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vlmpipe.trainer.data.chat.encode import IGNORED, Chat
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.evaluation.metrics import Prediction, Question, TrainingSlice, baseline_answers, exact_match
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts, paired_counts
from vlmpipe.trainer.evaluation.validation.champion import Rescored

Right = Mapping[tuple[str, int], bool]  # by id and turn of a question


def right_of(predictions: Sequence[Prediction]) -> Right:
    return {(prediction.id, prediction.turn): prediction.correct for prediction in predictions}


class Pairs:
    """The model's answers beside others to the same questions."""

    def __init__(self, predictions: Sequence[Prediction]) -> None:
        self._groups = {prediction.id: prediction.image_group for prediction in predictions}
        self._own = right_of(predictions)

    def beside(self, other: Right) -> PairedCounts:
        groups, predictions = [self._groups[identity] for identity, _ in other], [self._own[key] for key in other]
        return paired_counts(groups, predictions, list(other.values()))


def paired_answers(
    pairs: Pairs,
    questions: Sequence[Question],
    controls: Mapping[str, Sequence[Prediction]],
    slices: Mapping[str, TrainingSlice],
) -> dict[str, object]:
    """The model's answers beside the majority baseline's and each control's. slices: of stats.json."""
    keys = [(question.id, question.turn) for question in questions]
    others = {"chance": dict(zip(keys, baseline_answers(questions, slices), strict=True))}
    others |= {control: dict(right_of(predictions)) for control, predictions in controls.items()}
    return {name: pairs.beside(right).model_dump() for name, right in others.items()}


def control_scores(predictions: Sequence[Prediction], asked: int, resized: int) -> dict[str, object]:
    """Exact match with a control, on how many questions it stands, and how many images were made for it.

    Args:
        asked: questions of the model itself.
        resized: questions that were shown images of another size, resized.
    """
    return {**exact_match(predictions), "left_out": asked - len(predictions), "resized": resized}


def champion_scores(rescored: Rescored, pairs: Pairs) -> dict[str, object]:
    """The champion's part of evaluate.json."""
    content: dict[str, object] = {"version": rescored.pointer.version, "run_id": rescored.pointer.run_id}
    if rescored.obstacle:
        return content | {"obstacle": rescored.obstacle}
    scores = exact_match(rescored.predictions)
    paired = pairs.beside(right_of(rescored.predictions)).model_dump()
    counts = {"questions": scores["questions"], "exact_match": scores["exact_match"]}
    return content | counts | {"in_its_training": rescored.in_its_training, "paired": paired}


def cut_answers(
    predictions: Sequence[Prediction], questions: Sequence[Question], chat: Chat, max_new_tokens: int
) -> dict[str, object]:
    """Answers that ended at the limit of tokens, and expected answers that are longer than it allows."""
    expected = {question.answer for question in questions}
    longer = {answer for answer in expected if _generated_tokens(chat, answer) > max_new_tokens}
    return {
        "max_new_tokens": max_new_tokens,
        "cut_answers": sum(prediction.finish_reason == "length" for prediction in predictions),
        "longer_expected_answers": sum(question.answer in longer for question in questions),
    }


def _generated_tokens(chat: Chat, answer: str) -> int:
    """Tokens that a model generates for an answer, without those that end it: a template may begin it with a space."""
    labels = [label for label in chat.encode([Turn("?", answer)], []).labels if label != IGNORED]
    while labels and labels[-1] in chat.end_token_ids:
        labels.pop()
    return len(labels)
