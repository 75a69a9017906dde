"""The champion's answers to the questions of this evaluation, by the same code in the same job.

A registered score is of other questions, or of an earlier program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from pydantic import ValidationError

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.shards.image_index import ImageTable
from vlmpipe.trainer.data.shards.index import Index, SplitIndex
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.evaluation.answer import AnsweringModel, Asked, ShownImages
from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.evaluation.metrics import Prediction, Question
from vlmpipe.trainer.evaluation.validation.champion_pointer import ChampionPointer
from vlmpipe.trainer.evaluation.validation.questions import ValidationSplit, answer, asked_with
from vlmpipe.trainer.models.image_tokens import image_form_of, sample_image_tokens
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.serving.exported_model import load_export
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import NAME as EXPORT
from vlmpipe.trainer.storage.records import read_record


@dataclass(frozen=True)
class Rescored:
    """The champion's answers, or why there are none. in_its_training: questions left out for that."""

    pointer: ChampionPointer
    predictions: Sequence[Prediction] = ()
    in_its_training: int = 0
    obstacle: str = ""


def rescore(
    job: JobConfig,
    pointer: ChampionPointer,
    validation: ValidationSplit,
    questions: Sequence[Question],
    budget: BatchBudget,
    worker: ProcessContext,
) -> Rescored:
    """Ask the champion the questions of this run's model, but for those of its training data. Collective.

    It is asked as its own run would ask it: with its tokenizer and image sizes, and its tower for all images.

    Args:
        budget: of the batches, as this rank's earlier questions have left it.
    """
    of_rank = _answers(job, pointer, validation, questions, budget, worker)
    everyone: list[Rescored | None] = [None] * worker.world_size
    dist.all_gather_object(everyone, of_rank)
    parts = [part for part in everyone if part]
    for part in parts:
        if part.obstacle:
            return part
    predictions = sorted((p for part in parts for p in part.predictions), key=lambda p: (p.id, p.turn))
    if not predictions:
        return Rescored(pointer, obstacle="all questions are of data that it was trained on")
    return Rescored(pointer, predictions, sum(part.in_its_training for part in parts))


def _answers(
    job: JobConfig,
    pointer: ChampionPointer,
    validation: ValidationSplit,
    questions: Sequence[Question],
    budget: BatchBudget,
    worker: ProcessContext,
) -> Rescored:
    try:
        its_run = open_storage(pointer.run_uri)
        if any(its_run.stat(name) is None for name in ("run.json", DataPointers.FILE, EXPORT)):
            return Rescored(pointer, obstacle=f"its run's files are gone from {pointer.run_uri}")
        if (now := read_record(its_run, EXPORT).get("checkpoint", "")) != pointer.checkpoint:
            return Rescored(pointer, obstacle=f"its run was exported again since it was registered, from {now}")
        settings = JobConfig.read(its_run)
        settings = settings.model_copy(update={"evaluate": job.evaluate})
        its_data = settings.pointers().prepared_uri
        if its_data == job.pointers().prepared_uri:
            fair = list(questions)
        else:
            fair = not_trained_on(Index.load(its_data).split("train"), validation.split, questions)
        family, model = load_export(settings, worker.device)
        chat = Chat.load(open_prepared(its_data), image_form_of(settings.model))
        asking = AnsweringModel(family, model, chat, None, budget)
        predictions, size = list[Prediction](), job.evaluate.batch_questions
        for start in range(0, len(fair), size):
            batch = [(question, _asked(settings, validation, question)) for question in fair[start : start + size]]
            predictions += answer(settings, asking, batch, worker.device)
    except torch.OutOfMemoryError:
        return Rescored(pointer, obstacle="it cannot be asked: these GPUs have too little memory for it")
    except (UserError, ValidationError) as error:
        problem = error.found if isinstance(error, UserError) else str(error.errors()[0]["msg"])
        return Rescored(pointer, obstacle=f"it cannot be asked: {problem}")
    return Rescored(pointer, predictions, len(questions) - len(fair))


def not_trained_on(trained: SplitIndex, validation: SplitIndex, questions: Sequence[Question]) -> list[Question]:
    """The questions of samples, and about images, that `trained` does not have.

    trained: the champion's training split; validation: the split that the questions are of.
    """
    images = sorted({image for question in questions for image in validation.image_sha256(question.sample)})
    places = ImageTable(images).find(trained.images())
    known = {images[place] for place in set(places[places >= 0].tolist())}
    return [
        question
        for question in questions
        if trained.number(question.id) is None and known.isdisjoint(validation.image_sha256(question.sample))
    ]


def _asked(job: JobConfig, validation: ValidationSplit, question: Question) -> Asked:
    """The question with its images as this model counts their tokens."""
    shown = validation.images(question.sample, question.images)
    counts = sample_image_tokens(job.model)(shown.sizes) if shown.sizes else []
    images = ShownImages(counts, shown.sizes, shown.sha256, shown.read, are_cached=False)
    return asked_with(question, images, images)
