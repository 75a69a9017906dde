"""Quantized exports, asked the questions of the export, by the same code in the same job.

The job has the export, the questions and machines that hold the model: a step of its own would start all that again.
An evaluation is whole without quantized exports: what the model or the machine does not allow becomes an obstacle.
What may pass by itself, such as storage that is away, ends the step, which asks again when it is repeated: it says
nothing about the export.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from vlmpipe.trainer.checkpoint.quantized.layers import QuantizedLayers, quantized_layers
from vlmpipe.trainer.checkpoint.quantized.upload import delete_quantized, upload_quantized
from vlmpipe.trainer.checkpoint.quantized.writer import write_quantized
from vlmpipe.trainer.checkpoint.staging import export_folder
from vlmpipe.trainer.config.checkpoint import QUANTIZED_PACKAGE, QuantizeConfig, QuantizedFormat
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.agreement import gather, together
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import UserError, require_package
from vlmpipe.trainer.evaluation.answer import AnsweringModel
from vlmpipe.trainer.evaluation.baseline.score import Asking
from vlmpipe.trainer.evaluation.metrics import Prediction, Question, exact_match
from vlmpipe.trainer.evaluation.significance.paired import interval
from vlmpipe.trainer.evaluation.validation.questions import ValidationSplit, answer, with_images
from vlmpipe.trainer.evaluation.validation.result import Pairs, right_of
from vlmpipe.trainer.models.layers.lora import without_adapters
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.quantized import QuantizedScores
from vlmpipe.trainer.serving.exported_model import load_folder
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import link_export

TOO_LITTLE = "these GPUs have too little memory for it"


def require_quantizing(job: JobConfig) -> None:
    """Raise MissingPackageError where the run asks for quantized exports that this machine cannot write."""
    if job.evaluate.quantize:
        require_package(QUANTIZED_PACKAGE)


@dataclass(frozen=True)
class QuantizedExports:
    """The formats that a run asks for, and the questions of this rank."""

    job: JobConfig
    validation: ValidationSplit
    questions: Sequence[Question]
    asking: Asking

    def scores(
        self, predictions: Sequence[Prediction], worker: ProcessContext, progress: Progress | None
    ) -> dict[str, QuantizedScores]:
        """Scores by format, beside the export's predictions; none on other ranks than 0. Collective.

        Raises UserError on all ranks for what may pass: storage that is away, a full disk.
        """
        asked = self.job.evaluate.quantize
        result: dict[str, QuantizedScores] = {}
        if worker.is_first:
            for form in set(get_args(QuantizedFormat)) - set(asked.formats if asked else ()):
                delete_quantized(open_storage(self.job.run.run_uri), form)  # of an earlier evaluation
        if not asked:
            return result
        for form in asked.formats:
            started = time.perf_counter()
            try:
                scores = self._scores_of(form, asked, predictions, worker, progress)
            except UserError as error:
                if error.passes:
                    raise
                scores = QuantizedScores(obstacle=error.found)
            if worker.is_first:
                if not scores.accepted:
                    delete_quantized(open_storage(self.job.run.run_uri), form)
                result[form] = scores.model_copy(update={"wall_s": time.perf_counter() - started})
                print(f"evaluate: {scores.sentence(form)}", flush=True)
        return result

    def _scores_of(
        self,
        form: QuantizedFormat,
        asked: QuantizeConfig,
        predictions: Sequence[Prediction],
        worker: ProcessContext,
        progress: Progress | None,
    ) -> QuantizedScores:
        """Raises UserError on all ranks where the export cannot be made, asked or uploaded. Collective."""
        with contextlib.ExitStack() as scratch:

            def place() -> str:
                return str(scratch.enter_context(export_folder())) if worker.is_node_leader else ""

            folders = gather((worker.node, together(worker, f"making a folder for the {form} export", place)), worker)
            folder = Path(next(path for node, path in folders if node == worker.node and path))
            source, target = folder / "export", folder / form
            layers = together(worker, f"writing the {form} export", lambda: self._write(form, source, target, worker))
            answers = self._answers(form, target, worker, progress)
            if not worker.is_first:
                together(worker, f"uploading the {form} export", lambda: None)
                return QuantizedScores()
            assert layers
            scores = _beside(predictions, answers).model_copy(
                update={
                    "min_agreement": asked.min_agreement,
                    "layers": len(layers.stored),
                    "left": layers.left,
                    "group_size": layers.group_size,
                    "export_bytes": _weight_bytes(source),
                    "quantized_bytes": _weight_bytes(target),
                }
            )
            scores = scores.model_copy(update={"accepted": scores.agreement >= asked.min_agreement})
            store = open_storage(self.job.run.run_uri)
            together(
                worker,
                f"uploading the {form} export",
                lambda: upload_quantized(store, target, form) if scores.accepted else None,
            )
            return scores

    def _write(
        self, form: QuantizedFormat, source: Path, target: Path, worker: ProcessContext
    ) -> QuantizedLayers | None:
        if not worker.is_node_leader:
            return None
        blueprint = family_of(self.job.model).blueprint(without_adapters(self.job.model), self.asking.chat.tokenizer)
        layers = quantized_layers(blueprint, form)
        source.mkdir()
        link_export(open_storage(self.job.run.run_uri), source)
        write_quantized(source, target, form, layers)
        return layers

    def _answers(
        self, form: QuantizedFormat, folder: Path, worker: ProcessContext, progress: Progress | None
    ) -> list[Prediction]:
        """Predictions of all ranks."""
        loaded = together(worker, f"loading the {form} export", lambda: load_folder(self.job, folder, worker.device))
        asking = self.asking
        model = AnsweringModel(family_of(self.job.model), loaded, asking.chat, asking.features, asking.budget)
        answers = partial(self._answers_of_rank, form, model, worker, progress)
        parts = gather(together(worker, f"asking the {form} export", answers), worker)
        del model, loaded, answers
        gc.collect()
        if worker.device.type == "cuda":
            torch.cuda.empty_cache()
        return [prediction for part in parts for prediction in part]

    def _answers_of_rank(
        self, form: QuantizedFormat, model: AnsweringModel, worker: ProcessContext, progress: Progress | None
    ) -> list[Prediction]:
        answers, size = list[Prediction](), self.job.evaluate.batch_questions
        try:
            for start in range(0, len(self.questions), size):
                batch = with_images(self.validation, self.questions[start : start + size])
                answers += answer(self.job, model, batch, worker.device)
                if progress:
                    progress.update(len(answers), len(self.questions), unit="questions", message=f"{form} export")
        except torch.OutOfMemoryError as error:
            raise UserError(TOO_LITTLE) from error
        return answers


def _beside(export: Sequence[Prediction], quantized: Sequence[Prediction]) -> QuantizedScores:
    """Both sides' answers to the same questions."""
    answers = {_key(prediction): (prediction.prediction, prediction.finish_reason) for prediction in export}
    paired = Pairs(export).beside(right_of(quantized))
    low, high = interval(paired)
    return QuantizedScores(
        questions=len(quantized),
        same=sum(
            answers[_key(prediction)] == (prediction.prediction, prediction.finish_reason) for prediction in quantized
        ),
        before=exact_match(export)["exact_match"],
        after=exact_match(quantized)["exact_match"],
        interval=(-high, -low),  # the counts are of the export less the quantized one
        paired=paired.model_dump(),
    )


def _key(prediction: Prediction) -> tuple[str, int]:
    return prediction.id, prediction.turn


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
