"""Questions about the same images, answered from what their prompts begin with: as each alone, or not so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.support.hf.kinds import INSTALLED
from tests.support.hf.publish import model_section
from tests.support.short_form import WHOLE
from tests.support.trainer.native_models import picture
from tests.support.trainer.shared_prefixes import LLAVA, job_of, write_questions
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.prepare.pipeline import prepare
from vlmpipe.trainer.evaluation.answer import AnsweringModel, Asked, answer_questions, ask_about
from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.evaluation.generate import GeneratedAnswer
from vlmpipe.trainer.evaluation.shared_prompts import continued
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.storage import open_storage

pytest_plugins = ("tests.support.hf.published",)

CPU = torch.device("cpu")
WINDOWS, STATES, AHEAD = "DynamicSlidingWindowLayer", "LinearAttentionLayer", "see the question"
ALONE = {
    "gemma3": WINDOWS, "gemma4": WINDOWS, "aya_vision": WINDOWS, "qwen3_5": STATES, "qwen3_5_moe": STATES,
    "lfm3_vl": STATES, "paligemma": AHEAD,
}  # fmt: skip
SHARING = sorted(INSTALLED.keys() - ALONE.keys()) if WHOLE else ["qwen2_5_vl", "llava_onevision"]
NOT_SHARING = sorted(ALONE) if WHOLE else ["gemma3", "paligemma"]


@dataclass(frozen=True)
class Case:
    job: JobConfig
    model: AnsweringModel
    questions: list[Asked]

    def answers(self) -> list[GeneratedAnswer]:
        return answer_questions(self.job, self.model, self.questions, CPU, max_new_tokens=6)

    def alone(self) -> list[GeneratedAnswer]:
        """Each question in a batch of its own."""
        return [
            answer for one in self.questions
            for answer in answer_questions(self.job, self.model, [one], CPU, max_new_tokens=6)
        ]  # fmt: skip


def case(root: Path, section: dict[str, Any], model: torch.nn.Module | None = None) -> Case:
    """Three images of two sizes, with four, three and two questions of other lengths."""
    job = job_of(root, section, write_questions(root / "data") | {"sequence_length": 2048})
    job = job.model_copy(update={"train": job.train.model_copy(update={"precision": "fp32"})})  # as the weights
    uri = prepare(job, Progress(job.run.run_uri, "prepare-data", quiet=True)).uri
    chat, family = Chat.load(open_storage(uri), image_form_of(job.model)), family_of(job.model)
    torch.manual_seed(0)
    answering = AnsweringModel(
        family, (model or family.build(job.model, chat.tokenizer)).eval(), chat, None, BatchBudget(100_000)
    )
    questions = [
        ask_about(job, chat, f"what is {'very ' * 2 * number}{number}?", picture(image, size), f"{image} {number}")
        for image, size in enumerate([(40, 24), (40, 24), (24, 40)])
        for number in range(4 - image)
    ]
    return Case(job, answering, questions)


@pytest.fixture
def published_case(published: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Case]:
    def of(model_type: str) -> Case:
        folder = published(model_type)
        return case(tmp_path, model_section(folder, freeze=()), AutoModelForImageTextToText.from_pretrained(folder))

    return of


@pytest.mark.parametrize("model_type", SHARING)
def test_answers_are_those_of_each_question_alone(model_type: str, published_case: Callable[[str], Case]) -> None:
    made = published_case(model_type)
    expected = made.alone()
    assert made.model.shared.is_equal is None, "nothing is shared by one question"
    assert made.answers() == expected
    assert made.model.shared.is_equal
    assert made.answers() == expected, "now from shared beginnings"


def test_a_family_with_features_of_its_own_shares_too(tmp_path: Path) -> None:
    made = case(tmp_path, LLAVA)
    expected = made.alone()
    assert (made.answers(), made.model.shared.is_equal, made.answers()) == (expected, True, expected)


@pytest.mark.parametrize("model_type", NOT_SHARING)
def test_a_model_that_cannot_go_on_from_a_beginning_is_known(
    model_type: str, published_case: Callable[[str], Case], capsys: pytest.CaptureFixture[str]
) -> None:
    made = published_case(model_type)
    assert made.answers() == made.alone() == made.answers()
    said = capsys.readouterr().err
    assert ALONE[model_type] in said and said.count("computed one by one") == 1


def without_positions(_self: object, _given: object, _ids: Tensor, _numbers: object) -> dict[str, object]:
    return {}


def padding_as_tokens(prompts: list[list[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    ids, mask = LEFT_PADDED(prompts, pad_token_id)
    return ids, torch.ones_like(mask)


LEFT_PADDED = continued.left_padded


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [(continued.Shared, "_positions", without_positions), (continued, "left_padded", padding_as_tokens)],
)
def test_a_mistake_is_seen_in_the_logits(
    place: object, name: str, wrong: object, published_case: Callable[[str], Case],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    made = published_case("qwen2_5_vl")
    expected = made.alone()
    monkeypatch.setattr(place, name, wrong)
    assert made.answers() == made.answers() == expected
    assert made.model.shared.is_equal is False and "computed one by one" in capsys.readouterr().err
