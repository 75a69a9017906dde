"""The start weights in an evaluation: asked what the trained model was asked, once for all runs with the same start.

Their answers lie under the root of all runs, in a folder for the questions, the settings and the addresses of the
weights. Answers of weights that have changed at their address are not used.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import transformers

from vlmpipe.trainer import __version__
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.distributed.agreement import gather, on_first, together
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import UserError, os_errors
from vlmpipe.trainer.evaluation.answer import AnsweringModel
from vlmpipe.trainer.evaluation.baseline.compared import gained, retained
from vlmpipe.trainer.evaluation.baseline.probe import Probe, open_probe
from vlmpipe.trainer.evaluation.baseline.start_model import load_start, weights_identity
from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.evaluation.benchmarks.run import Benchmarks
from vlmpipe.trainer.evaluation.metrics import Prediction, Question, is_right
from vlmpipe.trainer.evaluation.validation.questions import ValidationSplit, answer, with_images
from vlmpipe.trainer.feature_cache.reader import FeatureReader
from vlmpipe.trainer.hooks.rules import rules_of
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.evaluation import StartScores
from vlmpipe.trainer.records.start_answers import StartAnswers
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri

# Of the model section: what is trained, how, and with whose access.
NOT_OF_THE_START = {"freeze", "freeze_parameters", "train_parameters", "lora", "hub_token_secret"}
TOO_LITTLE = "these GPUs have too little memory for them"


@dataclass(frozen=True)
class Asking:
    """Chat, cached features and batches of the trained model, with which other weights of it are asked."""

    chat: Chat
    features: FeatureReader | None
    budget: BatchBudget


@dataclass(frozen=True)
class StartWeights:
    """The start weights' part of an evaluation, which is whole without it: what fails here becomes an obstacle.

    obstacle: why they are not asked.
    """

    job: JobConfig
    validation: ValidationSplit
    questions: Sequence[Question]
    benchmarks: Benchmarks
    probe: Probe
    obstacle: str = ""

    @classmethod
    def of(
        cls, job: JobConfig, validation: ValidationSplit, questions: Sequence[Question], benchmarks: Benchmarks
    ) -> StartWeights:
        obstacle = ""
        if job.evaluate.baseline == "off":
            obstacle = "evaluate.baseline is off"
        elif drawn := job.model.drawn_parts:
            obstacle = f"training starts from random weights: model.{drawn[0]} names none"
        probe = Probe(obstacle=obstacle) if obstacle else open_probe(job, validation, benchmarks)
        return cls(job, validation, questions, benchmarks, probe, obstacle)

    def probing(
        self, model: AnsweringModel, of_benchmarks: Mapping[str, Sequence[str]], worker: ProcessContext
    ) -> tuple[StartWeights, list[str]]:
        """Ask the trained model the probe, but for benchmarks, which it has answered. Collective.

        Returns this part, without a probe that cannot be asked, and on rank 0 the answers.
        """
        if self.probe.obstacle:
            return self, []
        if self.probe.benchmarks:
            answers = self.probe.of_benchmark_answers(of_benchmarks, self.benchmarks) if worker.is_first else []
            return self, answers
        try:
            return self, self._probe_answers(model, worker)
        except UserError as error:
            return replace(self, probe=Probe(obstacle=f"the trained model was not asked: {error.found}")), []

    def scores(
        self,
        asking: Asking,
        predictions: Sequence[Prediction],
        trained: Sequence[str],
        worker: ProcessContext,
        progress: Progress | None,
    ) -> StartScores | None:
        """Scores beside the trained model's predictions and its answers to the probe; None on other ranks than 0, and
        where the run asks no start weights. Collective."""
        started = time.perf_counter()
        if self.obstacle:
            asks = worker.is_first and self.job.evaluate.baseline != "off"
            return StartScores(obstacle=self.obstacle) if asks else None
        try:
            uri, weights, answers, note = on_first(worker, lambda: self._look(worker.device))
            is_reused = answers is not None
            if answers is None:
                if progress and note:
                    print(f"evaluate: {note}", flush=True)
                answers = self._ask(asking, weights, worker, progress)
                if worker.is_first and (lost := _write(answers, uri)):
                    note = "; ".join(filter(None, [note, lost]))
        except UserError as error:
            return StartScores(origin=self._origin, obstacle=error.found) if worker.is_first else None
        if not worker.is_first:
            return None
        right = {
            (asked.id, asked.turn): is_right(asked.answer, text)
            for asked, text in zip(self.questions, answers.answers, strict=True)
        }
        result = gained(predictions, [right[asked.id, asked.turn] for asked in predictions], self.job.data.slices)
        return result.model_copy(
            update={
                "origin": self._origin,
                "note": note,
                "is_reused": is_reused,
                "retention": retained(self.probe, answers.probe, trained),
                "wall_s": time.perf_counter() - started,
            }
        )

    @property
    def _origin(self) -> str:
        names = {part.origin(0) for name, part in self.job.model.sources.items() if part and part.weights}
        return ", ".join(sorted(names))

    def _look(self, device: torch.device) -> tuple[str, dict[str, str], StartAnswers | None, str]:
        """Where the answers lie, what identifies the weights, their answers if these are there, and why they are not
        used."""
        uri = join_uri(self.job.run.baselines_root, self._key(device))
        weights = weights_identity(self.job)
        answers = StartAnswers.read_if_whole(open_storage(uri))
        if answers and (changed := answers.differences(weights)):
            note = f"the start's answers in {uri} belong to other weights and are not used: {'; '.join(changed)}"
            return uri, weights, None, note
        return uri, weights, answers, ""

    def _key(self, device: torch.device) -> str:
        """Digest of the addresses of the weights, of the questions, and of all settings that decide the answers."""
        job = self.job
        draws = not job.model.tower.weights or any(rules.draws_weights for rules in rules_of(job.model))
        model = job.model.model_dump(mode="json", exclude=NOT_OF_THE_START | (set() if draws else {"seed"}))
        asked = [(asked.id, asked.turn, asked.question, asked.answer, asked.images) for asked in self.questions]
        content = {
            "model": model,
            "adapter": job.model.lora.pretrained if job.model.lora else "",
            "rounds_features": "tower" in job.model.freeze,
            "dtypes": [job.train.precision, job.export_dtype],
            "data": job.pointers().prepared_uri.rstrip("/").rpartition("/")[2],
            "questions": hashlib.sha256(repr(asked).encode()).hexdigest(),
            "answers": [job.evaluate.max_new_tokens, job.evaluate.earlier_turns],
            "probe": self.probe.digest(),
            "versions": [__version__, torch.__version__, transformers.__version__, device.type],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    def _ask(
        self, asking: Asking, weights: dict[str, str], worker: ProcessContext, progress: Progress | None
    ) -> StartAnswers:
        """Load the start weights and ask them. Collective. Raises UserError on all ranks where that cannot be."""
        started = time.perf_counter()
        start = load_start(self.job, asking.chat.tokenizer, worker.device, worker)
        model = AnsweringModel(family_of(self.job.model), start, asking.chat, asking.features, asking.budget)
        texts = partial(self._texts, model, worker, progress)
        answers = _asked_by_all(worker, "asking the start weights", texts, len(self.questions))
        probe = () if self.probe.obstacle else self._probe_answers(model, worker)
        del model, start, texts
        gc.collect()
        if worker.device.type == "cuda":
            torch.cuda.empty_cache()
        return StartAnswers(
            weights=weights, answers=tuple(answers), probe=tuple(probe), asked_s=time.perf_counter() - started
        )

    def _texts(self, model: AnsweringModel, worker: ProcessContext, progress: Progress | None) -> list[str]:
        """The model's answers to this rank's share of the questions."""
        questions, answers = self.questions[worker.rank :: worker.world_size], list[str]()
        size = self.job.evaluate.batch_questions
        for first in range(0, len(questions), size):
            asked = with_images(self.validation, questions[first : first + size])
            answers += [prediction.prediction for prediction in answer(self.job, model, asked, worker.device)]
            if progress:
                progress.update(len(answers), len(questions), unit="questions", message="start weights")
        return answers

    def _probe_answers(self, model: AnsweringModel, worker: ProcessContext) -> list[str]:
        """Collective. Raises UserError on all ranks where the model cannot answer."""
        count = len(self.probe.parts)
        numbers = range(worker.rank, count, worker.world_size)

        def texts() -> list[str]:
            return self.probe.answers(self.job, model, self.validation, numbers, worker.device)

        return _asked_by_all(worker, "asking the retention probe", texts, count)


def _asked_by_all(worker: ProcessContext, doing: str, texts: Callable[[], list[str]], count: int) -> list[str]:
    """Answers of all ranks in the order of `count` questions, of which rank r has numbers r, r + ranks, and further.

    Raises UserError on all ranks where one fails, whatever the error is: an evaluation is not lost by it. Collective.
    """

    def of_rank() -> list[str]:
        try:
            return texts()
        except torch.OutOfMemoryError as error:
            raise UserError(TOO_LITTLE) from error

    parts = gather(together(worker, doing, of_rank), worker)
    return [parts[place % len(parts)][place // len(parts)] for place in range(count)]


def _write(answers: StartAnswers, uri: str) -> str:
    """Keep the answers for later runs. Returns why that failed."""
    try:
        with os_errors(f"writing {uri}"):
            answers.write(open_storage(uri))
    except UserError as error:
        return f"the start's answers were not kept for later runs: {error.found}"
    return ""
