"""Part `shared-questions`: answers to questions about the same images, from one computation of each image's part."""

from __future__ import annotations

import io
import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image

from benchmarks.support.suite import Bench
from benchmarks.support.workloads import Workload, workload
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.evaluation.answer import AnsweringModel, Asked, answer_questions, ask_about
from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.evaluation.shared_prompts.continued import SharedPrompts
from vlmpipe.trainer.models.registry import family_of

PATCH = 8  # pixels
FULL, QUICK = (16, 64, 256, 576), (16,)  # tokens of an image
IMAGES, NEW_TOKENS, BATCH_TOKENS = 3, 4, 16_384
SETTINGS = (
    "model.language_model.config.hidden_size=256",
    "model.language_model.config.intermediate_size=704",
    "model.language_model.config.num_key_value_heads=2",
    "model.language_model.config.max_position_embeddings=8192",
    "data.sequence_length=2048",
)
SHARED, ALONE = "each image once", "an image with each question"
NOTE = (
    "Shared questions: greedy answers of four tokens to easy-vqa's questions in their numbers for an image, about "
    "images of noise, by a model with random weights; the vision encoder takes each distinct image once on both sides."
)


@dataclass
class Answers:
    """All questions to a model; each call answers them."""

    job: JobConfig
    model: AnsweringModel
    asked: list[Asked]
    texts: list[str] = field(default_factory=list)

    def __call__(self) -> float:
        """Return how many there are."""
        cpu = torch.device("cpu")
        made = answer_questions(self.job, self.model, self.asked, cpu, max_new_tokens=NEW_TOKENS)
        self.texts = [one.text for one in made]
        return float(len(made))


def shared_questions(bench: Bench) -> None:
    """Equal questions, model, weights and answers on both sides."""
    sizes = QUICK if bench.quick else FULL
    bench.expect(len(sizes))
    for tokens in sizes:
        side = round(tokens**0.5) * PATCH
        load = workload(bench, "easy-vqa", (*SETTINGS, f"model.image_size={side}"), name=f"{tokens} image tokens")
        model, asked = answering_model(load), questions(load, side)
        alone, shared = (
            Answers(load.cached, replace(model, shared=SharedPrompts(is_equal)), asked) for is_equal in (False, None)
        )
        shared()  # in both ways
        bench.report.require(bool(shared.model.shared.is_equal), "the model goes on from what prompts begin with")
        data = f"{tokens} image tokens, {len(asked) / IMAGES:.1f} questions an image"
        rounds = bench.take_timed_turns(data, {SHARED: shared, ALONE: alone})
        bench.report.require(shared.texts == alone.texts, "the same answers on both sides")
        claim = "an answer: images computed once or with each question"
        bench.report.compare_rates(claim, data, "questions", (SHARED, rounds[SHARED]), (ALONE, rounds[ALONE]))
    bench.report.note(NOTE)


def answering_model(load: Workload) -> AnsweringModel:
    job = load.cached
    family = family_of(job.model)
    torch.manual_seed(0)
    model = family.build(job.model, load.chat.tokenizer).eval()
    return AnsweringModel(family, model, load.chat, None, BatchBudget(BATCH_TOKENS))


def questions(load: Workload, side: int) -> list[Asked]:
    """Easy-vqa's questions about its first images, each shown a square of noise instead."""
    import easy_vqa

    texts = sorted(zip(*reversed(easy_vqa.get_train_questions()), strict=True))  # by image, answer and question
    asked = []
    by_image = itertools.groupby(texts, key=lambda one: one[0])
    for number, (_, of_image) in enumerate(itertools.islice(by_image, IMAGES)):
        noise = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noise).save(buffer, "PNG")
        for place, (_, _, question) in enumerate(of_image):
            asked.append(ask_about(load.cached, load.chat, question, buffer.getvalue(), f"{number}-{place}"))
    return asked
