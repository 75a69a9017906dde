"""`vlmpipe serve --check` over a server that runs already, a strict fake; and what both commands refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.chat_model import ChatModelServer
from tests.support.command_line import Vlmpipe
from tests.support.reports import make_run, write_json
from vlmpipe.serving.questions import held_out_questions

ASKED = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluated run."""
    root = tmp_path_factory.mktemp("root")
    run = make_run(root)
    write_json(next((root / "prepared").iterdir()) / "tokenizer/chat.json", {"as_text": True})
    return run


def test_a_server_that_answers_as_evaluated_passes_and_one_that_does_not_ends_with_76(
    vlmpipe: Vlmpipe, run: Path
) -> None:
    answers = [one.evaluated for one in held_out_questions(str(run), ASKED)]
    for wrong, code in ((0, 0), (1, 76)):
        given = iter([*answers[wrong:], *["something else"] * wrong])
        with ChatModelServer("digits", lambda _question, given=given: next(given)) as server:
            asking = ("serve", str(run), "--check", str(ASKED), "--url", server.url, "--model", "digits", "--json")
            answer = vlmpipe(*asking)
        assert answer.code == code, answer.err
        assert answer.json["asked"] == ASKED == server.asked
        assert answer.json["ok"] == (answer.json["agreement"] == 1.0) == (not wrong)
    assert "the server does not answer as the evaluation" in answer.err


def test_what_cannot_be_asked_is_a_sentence(vlmpipe: Vlmpipe, run: Path, tmp_path: Path) -> None:
    answer = vlmpipe("serve", str(run), "--url", "http://127.0.0.1:9")
    assert answer.code == 64 and "--url is given without --check" in answer.err
    answer = vlmpipe("serve", "gone", "--check", "1", "--root", str(tmp_path))
    assert answer.code == 66 and "no run 'gone'" in answer.err
    answer = vlmpipe("predict", str(run), str(tmp_path), "--output", str(tmp_path / "answers.jsonl"))
    assert answer.code == 64 and "--question TEXT" in answer.err
