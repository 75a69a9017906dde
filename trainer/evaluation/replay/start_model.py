"""The model that a run starts from, with what asking it takes."""

from __future__ import annotations

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.evaluation.answer import AnsweringModel
from vlmpipe.trainer.evaluation.baseline.start_model import load_start
from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.models.registry import family_of


def answering_start(job: JobConfig, worker: ProcessContext) -> AnsweringModel:
    """The start weights as an evaluation loads them. Collective; raises as `load_start` does."""
    chat = make_chat(job.model, job.data, ())
    model = load_start(job, chat.tokenizer, worker.device, worker)
    return AnsweringModel(family_of(job.model), model, chat, None, BatchBudget(job.evaluate.batch_tokens))
