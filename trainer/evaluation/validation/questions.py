"""The validation questions of a run, and their answers by a model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.prepare.validation.deduplicate import counted_question
from vlmpipe.trainer.data.sample import DEFAULT_SLICE, Turn
from vlmpipe.trainer.data.shards.index import SplitIndex
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.evaluation.answer import AnsweringModel, Asked, ShownImages, answer_questions
from vlmpipe.trainer.evaluation.metrics import Prediction, Question, image_group, is_right
from vlmpipe.trainer.evaluation.validation.shuffled_images import ShuffledImages
from vlmpipe.trainer.hooks.features import features_of

MAX_TEXTS, FEWEST_OF_EACH = 12, 5  # distinct texts of questions, and questions of each on average
LONGEST_TEXT = 80  # characters, of a slice's name


@dataclass(frozen=True)
class ValidationSplit:
    """The validation split."""

    split: SplitIndex
    shards: ShardReader

    def images(self, sample: int, most: int | None = None) -> ShownImages:
        """Return the images of a sample, or the first `most` of them."""
        end = slice(most)
        return ShownImages(
            self.split.image_token_counts(sample)[end],
            self.split.image_sizes(sample)[end],
            self.split.image_sha256(sample)[end],
            lambda: self.shards.images(self.split.sample_location(sample))[end],
            are_cached=True,
        )

    def questions(self, max_samples: int, earlier_turns: Literal["reference", "none"]) -> list[Question]:
        """Every turn of the samples, or of `max_samples` evenly spaced ones, as a question.

        But for those that `asked_turns` leaves out. With earlier turns a question sees the images that these and it
        mark, as in training; alone, all of its sample's.
        """
        count = len(self.split)
        chosen = min(count, max_samples or count)
        questions = []
        for sample in (number * count // chosen for number in range(chosen)):
            turns = self.shards.turns(self.split.sample_location(sample))
            identity, system = self.split.ids[sample], turns[0].system
            group = image_group(identity, self.split.image_sha256(sample))
            for number, turn in asked_turns(turns):
                earlier: tuple[Turn, ...] = ()
                marks = None
                if earlier_turns == "reference":
                    earlier = tuple(turns[:number])
                    marks = sum(turn.question.count(IMAGE_TOKEN) for turn in turns[: number + 1])
                asked = (turn.slice, turn.question, turn.answer, system)
                questions.append(Question(sample, identity, number, *asked, earlier, marks, group, turn.fields))
        return by_text(questions)


def by_text(questions: list[Question]) -> list[Question]:
    """Questions with their texts as slices, where records name no slices and few texts are asked again and again.

    One accuracy over several questions hides that one of them always gets the same answer.
    """
    texts = [counted_question(question.question) for question in questions]
    kinds = set(texts)
    is_few = 1 < len(kinds) <= MAX_TEXTS and len(questions) >= FEWEST_OF_EACH * len(kinds)
    is_short = all(0 < len(text) <= LONGEST_TEXT for text in kinds)
    if not (is_few and is_short and all(question.slice == DEFAULT_SLICE for question in questions)):
        return questions
    return [replace(question, slice=text) for question, text in zip(questions, texts, strict=True)]


def asked_turns(turns: Sequence[Turn]) -> list[tuple[int, Turn]]:
    """The turns of a sample that can be asked, with their numbers.

    None of a sample with images in answers or with tools, as the model answers in text and no tool is there to answer
    it, and none whose answer was no label, which may be wrong.
    """
    if any(IMAGE_TOKEN in turn.answer or turn.has_tools for turn in turns):
        return []
    return [(number, turn) for number, turn in enumerate(turns) if not turn.is_context]


def shares_of(questions: Sequence[Question], ranks: int, most: int) -> list[list[Question]]:
    """The questions of each rank, as many each as can be: those about the same images together, at most `most`."""
    about: dict[str, list[Question]] = {}
    for question in questions:
        about.setdefault(question.image_group, []).append(question)
    shares: list[list[Question]] = [[] for _ in range(ranks)]
    for group in about.values():
        for start in range(0, len(group), most):
            min(shares, key=len).extend(group[start : start + most])
    return shares


def answer(
    job: JobConfig,
    model: AnsweringModel,
    asked: Sequence[tuple[Question, Asked]],
    device: torch.device,
    *,
    control: str = "",
) -> list[Prediction]:
    """The model's answers to questions, with the selection or the blank images of a control."""
    most, is_blank = job.evaluate.max_new_tokens, control == "no_image"
    with contextlib.ExitStack() as changes:
        for feature in features_of(job):
            changes.enter_context(feature.under_control(model.model, control))
        asked_images = [shown for _, shown in asked]
        answers = answer_questions(job, model, asked_images, device, max_new_tokens=most, is_blank=is_blank)
    return [
        Prediction(
            q.id,
            q.turn,
            q.slice,
            q.question,
            q.answer,
            answer.text,
            is_right(q.answer, answer.text),
            answer.finish_reason,
            q.image_group,
            q.fields,
        )
        for (q, _), answer in zip(asked, answers, strict=True)
    ]


def with_images(
    validation: ValidationSplit, questions: Sequence[Question], shuffled: ShuffledImages | None = None
) -> list[tuple[Question, Asked]]:
    """Each question with its images, or with other samples'; without those that have no others to be shown."""
    images = []
    for question in questions:
        unshuffled = validation.images(question.sample, question.images)
        shown = shuffled.instead_of(question.sample, unshuffled) if shuffled else unshuffled
        if shown is not None:
            images.append((question, asked_with(question, unshuffled, shown)))
    return images


def asked_with(question: Question, unshuffled: ShownImages, shown: ShownImages) -> Asked:
    """The question after its earlier turns; a sample's system text is before the first of these."""
    turn = Turn(question.question, "", system="" if question.earlier else question.system)
    return Asked(turn, unshuffled, shown, question.earlier)
