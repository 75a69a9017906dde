"""Logic of the steps of the start model's answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vlmpipe.config.run_settings import run_config_of
from vlmpipe.job_spec.build import worker_pools
from vlmpipe.job_spec.forms import WorkerPool
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.records.replay import ReplayAnswers, ReplayPointer, ReplayQuestions
from vlmpipe.trainer.storage import open_storage

if TYPE_CHECKING:
    from vlmpipe.trainer.progress import Progress

ReplayState = Literal["answer", "reuse"]


def choose_for_run(run_uri: str, progress: Progress) -> tuple[ReplayState, list[WorkerPool]]:
    """Choose what the start model of the run is asked. Returns whether it must answer, and the pools of the job."""
    from vlmpipe.trainer.evaluation.replay.questions import choose

    chosen = choose(JobConfig.load(f"{run_uri}/run.json"), progress)
    text = chosen.described()
    there = "the answers are there" if chosen.answers else "to be answered"
    progress.finish("reused" if chosen.answers else "done", f"{text}; {there}, in {chosen.folder}")
    store = open_storage(run_uri)
    return ("reuse" if chosen.answers else "answer"), worker_pools(run_config_of(store), "replay", run_uri)


def why_nothing_is_answered(run_uri: str) -> str:
    """Describe for people the answers that an earlier run generated."""
    answers, questions = answers_of(run_uri)
    return f"generated before: {answers.described(questions)}"


def answers_of(run_uri: str) -> tuple[ReplayAnswers, ReplayQuestions]:
    """The counts of the start model's answers, and of its questions."""
    store = open_storage(ReplayPointer.require(open_storage(run_uri)).folder)
    return ReplayAnswers.require(store), ReplayQuestions.require(store)
