"""Asks the exported model a benchmark's questions and scores its answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from vlmpipe.trainer.config.benchmarks import ANSWERS_FOLDER, BenchmarkConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.evaluation.answer import AnsweringModel, Asked, answer_questions, ask_about
from vlmpipe.trainer.evaluation.benchmarks.like_train import images_like_train
from vlmpipe.trainer.evaluation.benchmarks.question import BenchmarkQuestion
from vlmpipe.trainer.evaluation.benchmarks.readers import read_benchmark
from vlmpipe.trainer.evaluation.benchmarks.scores import score
from vlmpipe.trainer.evaluation.generate import GeneratedAnswer
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import seal_lines

Benchmarks = Sequence[tuple[BenchmarkConfig, list[BenchmarkQuestion]]]


def open_benchmarks(job: JobConfig) -> Benchmarks:
    """The questions of the run file's benchmarks. Raises DataError for a file that is not what it should be."""
    return [(config, read_benchmark(config, job.data.max_image_bytes)) for config in job.evaluate.benchmarks]


@dataclass(frozen=True)
class Benchmarked:
    """Scores and 95 % intervals of all benchmarks for evaluate.json, and the answers; empty on other ranks than 0."""

    results: dict[str, object] = field(default_factory=dict)
    answers: dict[str, list[str]] = field(default_factory=dict)


def run_benchmarks(
    job: JobConfig, model: AnsweringModel, benchmarks: Benchmarks, worker: ProcessContext, progress: Progress | None
) -> Benchmarked:
    """Ask all benchmarks. Collective."""
    answered, size = Benchmarked(), job.evaluate.batch_questions
    for config, questions in benchmarks:
        of_this_rank = questions[worker.rank :: worker.world_size]
        predictions: list[GeneratedAnswer] = []
        signatures: dict[str, bytes] = {}  # by name of the image
        for start in range(0, len(of_this_rank), size):
            batch = [ask(job, model, config, question) for question in of_this_rank[start : start + size]]
            signatures |= {
                question.image.name: answer.shown.signatures[0]
                for question, answer in zip(of_this_rank[start : start + size], batch, strict=True)
            }
            answers = answer_questions(job, model, batch, worker.device, max_new_tokens=config.answer_tokens)
            predictions += answers
            if progress:
                progress.update(len(predictions), len(of_this_rank), unit="questions", message=config.name)
        everyone: list[tuple[list[GeneratedAnswer], dict[str, bytes]]] = [([], {})] * worker.world_size
        dist.all_gather_object(everyone, (predictions, signatures))
        if progress:
            ordered = [
                everyone[place % worker.world_size][0][place // worker.world_size] for place in range(len(questions))
            ]
            of_images = {name: digest for _, of_rank in everyone for name, digest in of_rank.items()}
            answered.answers[config.name] = [answer.text for answer in ordered]
            answered.results[config.name] = write_scores(job, config, questions, ordered) | images_like_train(
                job, config.name, questions, of_images
            )
    return answered


def ask(job: JobConfig, model: AnsweringModel, config: BenchmarkConfig, question: BenchmarkQuestion) -> Asked:
    """The question with its image, checked as data preparation checks samples. Raises DataError."""
    what = f"benchmark {config.name}, question {question.id}, image {question.image.name}"
    return ask_about(job, model.chat, question.text, question.image.read(), what)


def write_scores(
    job: JobConfig, config: BenchmarkConfig, questions: Sequence[BenchmarkQuestion], answers: Sequence[GeneratedAnswer]
) -> dict[str, object]:
    """Write the answers into the run's folder; returns the part of evaluate.json."""
    predictions = [answer.text for answer in answers]
    scored = score(config.format, questions, predictions)
    lines = [
        {
            "id": asked.id,
            "slice": asked.slice,
            "question": asked.text,
            "answers": asked.answers,
            "image": asked.image.name,
            "prediction": prediction,
            "score": value,
        }
        for asked, prediction, value in zip(questions, predictions, scored.of_questions, strict=True)
    ]
    open_storage(job.run.run_uri).write(f"{ANSWERS_FOLDER}/{config.name}.jsonl", seal_lines(lines))
    asked = repr([(question.id, question.text, question.answers) for question in questions])
    return {
        "format": config.format,
        "questions": len({question.group or question.id for question in questions}),
        "asked": len(questions),
        "images": len({question.image.name for question in questions}),
        "scores": scored.scores(),
        "intervals": scored.intervals(),
        "slices": scored.slices(),
        "max_new_tokens": config.answer_tokens,
        "cut_answers": sum(answer.finish_reason == "length" for answer in answers),
        "questions_sha256": hashlib.sha256(asked.encode()).hexdigest(),
    }
