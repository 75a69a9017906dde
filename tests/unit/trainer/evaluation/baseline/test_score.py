"""An evaluation is whole whatever happens to the start weights' part of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.evaluation.baseline import score
from vlmpipe.trainer.evaluation.baseline.probe import Probe, Prompt
from vlmpipe.trainer.evaluation.baseline.score import TOO_LITTLE, StartWeights
from vlmpipe.trainer.evaluation.metrics import Prediction, Question
from vlmpipe.trainer.records.evaluation import StartScores
from vlmpipe.trainer.records.start_answers import StartAnswers

WORKER = ProcessContext(0, 1, 0, 1, torch.device("cpu"))
QUESTION = Question(0, "a", 0, "", "Which?", "red", image_group="1")
PREDICTION = Prediction("a", 0, "", "Which?", "red", "red", correct=True, image_group="1")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartWeights:
    """Answers are to be written below a file, where no folder can be made."""
    (tmp_path / "file").touch()
    run = {"run": {"run_id": "r1", "root_uri": str(tmp_path)}}
    job = JobConfig.model_validate(merged(TINY, run))
    looked = (f"{tmp_path}/file/key", {"pretrained": "commit 1"}, None, "")
    monkeypatch.setattr(StartWeights, "_look", lambda *_: looked)
    return StartWeights(job, None, [QUESTION], (), Probe(obstacle="off"))  # type: ignore[arg-type]


def scores(start: StartWeights) -> StartScores:
    asking: Any = type("Asking", (), {"chat": type("Chat", (), {"tokenizer": None}), "features": None, "budget": None})
    result = start.scores(asking, [PREDICTION], [], WORKER, None)
    assert result
    return result


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("lm_head.weight"), "KeyError: 'lm_head.weight'"),
        (OSError(28, "No space left on device"), "no space left"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
    ],
)
def test_a_start_that_cannot_be_loaded_is_an_obstacle(
    start: StartWeights, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr("vlmpipe.trainer.evaluation.baseline.start_model.write_start", fails)
    result = scores(start)
    assert said in result.obstacle and result.before is None


@pytest.mark.parametrize(
    ("error", "said"),
    [(RuntimeError("device-side assert"), "device-side assert"), (torch.OutOfMemoryError(), TOO_LITTLE)],
)
def test_a_start_that_cannot_answer_is_an_obstacle(
    start: StartWeights, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(score, "load_start", lambda *_: torch.nn.Identity())
    monkeypatch.setattr(score, "with_images", fails)
    assert said in scores(start).obstacle
    prompted = StartWeights(start.job, None, [QUESTION], (), Probe(prompts=[Prompt("Which?", 0, "1")]))  # type: ignore[arg-type]
    monkeypatch.setattr(Probe, "answers", fails)
    without, answers = prompted.probing(None, {}, WORKER)  # type: ignore[arg-type]
    assert said in without.probe.obstacle and not answers


def test_answers_that_cannot_be_kept_are_used_and_that_is_said(
    start: StartWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = StartAnswers(weights={"pretrained": "commit 1"}, answers=("blue",))
    monkeypatch.setattr(StartWeights, "_ask", lambda *_: answers)
    result = scores(start)
    assert (result.obstacle, result.before, result.after) == ("", 0.0, 1.0)
    assert result.note.startswith("the start's answers were not kept for later runs: ")
