"""The retention probe: questions that start and trained weights are asked, to see what training lost."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from vlmpipe.trainer.config.benchmarks import BenchmarkConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.evaluation.answer import AnsweringModel, Asked, answer_questions
from vlmpipe.trainer.evaluation.benchmarks.question import BenchmarkQuestion
from vlmpipe.trainer.evaluation.benchmarks.run import Benchmarks, ask
from vlmpipe.trainer.evaluation.benchmarks.scores import score
from vlmpipe.trainer.evaluation.metrics import image_group, normalise
from vlmpipe.trainer.evaluation.validation.questions import ValidationSplit

RIGHT = 0.5  # of a graded score, from which an answer counts as right
UNSCORED = ("coco-captions",)  # whose score is of all captions together


@dataclass(frozen=True)
class Prompt:
    """A prompt about the first image of a sample of the validation split."""

    text: str
    sample: int
    image: str


@dataclass(frozen=True)
class Probe:
    """Questions of benchmarks, or prompts about validation images; or why there are none."""

    benchmarks: Benchmarks = ()
    prompts: Sequence[Prompt] = field(default=())
    obstacle: str = ""

    @property
    def form(self) -> str:
        return "benchmarks" if self.benchmarks else "agreement"

    @property
    def _of_benchmarks(self) -> list[tuple[BenchmarkConfig, BenchmarkQuestion]]:
        return [(config, question) for config, questions in self.benchmarks for question in questions]

    @property
    def parts(self) -> list[str]:
        """The benchmark or the prompt of each question."""
        return [config.name for config, _ in self._of_benchmarks] or [prompt.text for prompt in self.prompts]

    @property
    def images(self) -> list[str]:
        """The image of each question: answers about one are no independent evidence."""
        names = [f"{config.name}/{question.image.name}" for config, question in self._of_benchmarks]
        return names or [prompt.image for prompt in self.prompts]

    def digest(self) -> str:
        """Digest of everything that decides the answers but the model: of images, which may change under their names,
        their bytes."""
        contents = dict[tuple[str, str], str]()
        asked = []
        for config, question in self._of_benchmarks:
            image = (config.name, question.image.name)
            if image not in contents:
                contents[image] = question.image.content()
            asked.append(
                (config.name, config.format, config.answer_tokens, question.id, question.text, image, contents[image])
            )
        return hashlib.sha256(repr(asked or list(self.prompts)).encode()).hexdigest()

    def answers(
        self, job: JobConfig, model: AnsweringModel, validation: ValidationSplit, numbers: range, device: torch.device
    ) -> list[str]:
        """The model's answers to the questions with these numbers, in their order."""
        answers, size, of_benchmarks = list[str](), job.evaluate.batch_questions, self._of_benchmarks

        def limit(number: int) -> int:
            return of_benchmarks[number][0].answer_tokens if of_benchmarks else job.evaluate.max_new_tokens

        for most, of_limit in itertools.groupby(numbers, limit):
            chosen = list(of_limit)
            for start in range(0, len(chosen), size):
                asked = [
                    ask(job, model, *of_benchmarks[number])
                    if of_benchmarks
                    else _asked(validation, self.prompts[number])
                    for number in chosen[start : start + size]
                ]
                answers += [answer.text for answer in answer_questions(job, model, asked, device, max_new_tokens=most)]
        return answers

    def of_benchmark_answers(self, answers: Mapping[str, Sequence[str]], asked: Benchmarks) -> list[str]:
        """The answers to the probe among those to all questions of benchmarks."""
        by_id = {
            (config.name, question.id): answer
            for config, questions in asked
            for question, answer in zip(questions, answers[config.name], strict=True)
        }
        return [by_id[config.name, question.id] for config, question in self._of_benchmarks]

    def right_answers(self, start: Sequence[str], trained: Sequence[str]) -> tuple[list[bool], list[bool]]:
        """Return which answers of start and trained model are right; by agreement the start's all are."""
        if not self.benchmarks:
            same = [normalise(before) == normalise(after) for before, after in zip(start, trained, strict=True)]
            return [True] * len(start), same
        first, place = list[list[bool]]([[], []]), 0
        for config, questions in self.benchmarks:
            for right, answers in zip(first, (start, trained), strict=True):
                scored = score(config.format, questions, answers[place : place + len(questions)])
                right += [(value or 0.0) >= RIGHT for value in scored.of_questions]
            place += len(questions)
        return first[0], first[1]


def open_probe(job: JobConfig, validation: ValidationSplit, benchmarks: Benchmarks) -> Probe:
    """The run's probe. benchmarks: of the run, with all questions that they ask."""
    settings = job.evaluate.retention
    if settings.probe == "off":
        return Probe(obstacle="evaluate.retention.probe is off")
    shares = []
    for config, questions in benchmarks:
        # A multiple choice in another order of its choices is no question of its own.
        originals = [question for question in questions if question.group in ("", question.id)]
        if config.format not in UNSCORED and originals:
            count = settings.benchmark_questions(len(originals))
            shares.append((config, [originals[number * len(originals) // count] for number in range(count)]))
    if shares:
        return Probe(benchmarks=shares)
    if not settings.prompts:
        return Probe(obstacle="evaluate.retention has no prompts, and evaluate.benchmarks nothing that it can ask")
    samples = dict[str, int]()  # by image
    for sample in range(len(validation.split)):
        if images := validation.split.image_sha256(sample):
            samples.setdefault(images[0], sample)
    chosen = list(samples.items())
    count = min(len(chosen), settings.max_images)
    chosen = [chosen[number * len(chosen) // count] for number in range(count)]
    if not chosen:
        return Probe(obstacle="no validation sample has an image that a prompt could be about")
    prompts = [Prompt(text, sample, image_group("", [image])) for text in settings.prompts for image, sample in chosen]
    return Probe(prompts=prompts)


def _asked(validation: ValidationSplit, prompt: Prompt) -> Asked:
    image = validation.images(prompt.sample, 1)
    return Asked(Turn(f"{IMAGE_TOKEN}\n{prompt.text}", ""), image, image)
