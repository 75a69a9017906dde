"""Requests to a server: the chat template writes of them what evaluation asked, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.reports import make_run
from tests.support.trainer.tiny_runs import merged
from vlmpipe.serving.questions import chat_messages, validation_questions
from vlmpipe.trainer import secret_manager
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import read_record, write_record

IMAGE = b"\x89PNG"
QUESTIONS = {
    "<image>\nwhat is this?": 1,
    "what is this?\n<image>": 1,
    "what is this? <image>": 1,
    "<image>\n<image>\nwhich is larger?": 2,
    "is <image>\nlarger than\n<image>": 2,
    "is it even?": 1,  # a later turn: the image goes before it
    "is it even? ": 0,
}


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer("train:400", ["what is this? is it even? larger than"] * 3))


def as_template_takes(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As servers hand requests to the template."""
    return [
        {**one, "content": [{"type": "image"} if part["type"] == "image_url" else part for part in one["content"]]}
        if one["role"] == "user"
        else one
        for one in messages
    ]


@pytest.mark.parametrize("system", ["", "Answer briefly."])
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_template_writes_the_prompt_of_the_evaluation(chat: Chat, question: str, system: str) -> None:
    images = QUESTIONS[question]
    messages = chat_messages(question, system, [IMAGE] * images, as_text=True)
    written = chat.tokenizer.apply_chat_template(
        as_template_takes(messages), tokenize=False, add_generation_prompt=True
    )
    tokens = chat.tokenizer.encode(written, add_special_tokens=False)
    assert tokens == chat.prompt(Turn(question, "", system=system), [1] * images)


def test_a_later_turn_is_asked_after_the_earlier_ones_as_in_the_evaluation(chat: Chat) -> None:
    earlier = [Turn("<image>\nwhat is this?", "two", system="Be brief.")]
    messages = chat_messages("is it even?", "Be brief.", [IMAGE], as_text=True, earlier=earlier)
    written = chat.tokenizer.apply_chat_template(
        as_template_takes(messages), tokenize=False, add_generation_prompt=True
    )
    asked = chat.prompt(Turn("is it even?", ""), [1], earlier=earlier)
    assert chat.tokenizer.encode(written, add_special_tokens=False) == asked


def test_parts_of_a_published_template_have_no_line_ends_of_marks() -> None:
    messages = chat_messages("<image>\nwhat?", "", [IMAGE], as_text=False)
    assert [part["type"] for part in messages[0]["content"]] == ["image_url", "text"]
    assert messages[0]["content"][1]["text"] == "what?"
    assert messages[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


def test_a_run_gives_evenly_spaced_questions_with_their_pictures_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the hub's token, which whoever deploys a model may not read."""
    run = make_run(tmp_path)
    content = read_record(LocalStorage(run), "run.json")
    write_record(LocalStorage(run), "run.json", merged(content, {"model.hub_token_secret": "projects/p/secrets/hub"}))
    monkeypatch.setattr(secret_manager, "_read_for", lambda *_: pytest.fail("a secret is read"))
    settings = next((tmp_path / "prepared").iterdir()) / "tokenizer/chat.json"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text('{"as_text": true}')
    found = validation_questions(str(run), 7)
    assert len(found) == 7 == len({(one.id, one.turn) for one in found})
    assert all(sum(part["type"] == "image_url" for part in one.messages[0]["content"]) == 1 for one in found)
    assert [len(one.messages) for one in found] == [2 * one.turn + 1 for one in found], "after its earlier turns"
    assert IMAGE_TOKEN not in str(found)


def test_a_run_that_was_not_evaluated_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "predictions.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"predictions\.jsonl, which the step evaluate writes"):
        validation_questions(str(run), 1)
