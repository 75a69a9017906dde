"""`vlmpipe serve --check` over a server that runs already, a strict fake; what is printed; and what is refused."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakes.chat_model import ChatModelServer
from tests.support.command_line import Vlmpipe
from tests.support.reports import make_run, write_json
from vlmpipe.cli import answers
from vlmpipe.serving.questions import validation_questions
from vlmpipe.trainer.evaluation.prediction.answer_file import Answer, ToAnswer
from vlmpipe.trainer.evaluation.prediction.predict import Predictor

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
    expected = [one.evaluated for one in validation_questions(str(run), ASKED)]
    for wrong, code in ((0, 0), (1, 76)):
        given = iter([*expected[wrong:], *["something else"] * wrong])
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
    (tmp_path / "a.png").write_bytes(b"")
    answer = vlmpipe("predict", str(run), str(tmp_path), "--output", str(tmp_path / "answers.jsonl"))
    assert answer.code == 64 and "--question TEXT" in answer.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--quantized", "int3"], "--quantized is int3"),
        (["--quantized", "int4", "--check", "1", "--url", "http://127.0.0.1:9"], "--quantized is given with --url"),
    ],
)
def test_a_quantized_export_that_cannot_be_served_is_refused(
    options: list[str], said: str, vlmpipe: Vlmpipe, run: Path
) -> None:
    answer = vlmpipe("serve", str(run), *options)
    assert answer.code == 64 and said in answer.err


def test_sigterm_ends_a_server_as_ctrl_c_does(vlmpipe: Vlmpipe, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd, a container's stop or `kill` ask for it: exit code 0, and the server's own end is waited for."""
    ended = []

    class Server:
        url, model = "http://127.0.0.1:9/v1", "digits"

        def wait(self) -> None:
            assert signal.getsignal(signal.SIGTERM) is not before
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
            raise AssertionError("it was not stopped")

    @contextlib.contextmanager
    def serving(run_uri: str, *, port: int, quantized: str) -> Iterator[Server]:
        try:
            yield Server()
        finally:
            ended.append(port)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("vlmpipe.trainer.serving.local_server.serving", serving)
    answer = vlmpipe("serve", str(run), "--port", "8123")
    assert (answer.code, ended) == (0, [8123]), answer.err
    assert "answers at http://127.0.0.1:9/v1" in answer.err
    assert signal.getsignal(signal.SIGTERM) is before


class Echo:
    """A model whose answer is the question, with what a terminal would obey."""

    def answer(self, questions: Sequence[ToAnswer], *, batch: int = 0) -> Iterator[list[Answer]]:
        for one in questions:
            yield [Answer(str(one.image), one.question, f"\x1b[2J{one.question.upper()}\n\x07")]


@pytest.fixture
def picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Predictor, "load", lambda job: Echo())
    monkeypatch.setattr(answers, "_job_of", lambda run, root: SimpleNamespace(data=None))
    path = tmp_path / "a.png"
    path.write_bytes(b"")
    return path


def test_a_question_or_the_lines_of_standard_input_are_answered_without_control_characters(
    vlmpipe: Vlmpipe, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vlmpipe("ask", "r", str(picture), "what?").out == "\u241b[2JWHAT? \u2407\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("one?\n\ntwo?\n"))
    answer = vlmpipe("ask", "r", str(picture), "--json")
    assert [each["question"] for each in answer.json["answers"]] == ["one?", "two?"]


def test_predict_prints_what_no_file_is_given_for(vlmpipe: Vlmpipe, picture: Path) -> None:
    answer = vlmpipe("predict", "r", str(picture), "--question", "what?")
    assert answer.out == f"{picture}  \u241b[2JWHAT? \u2407\n"
    table = picture.with_name("asked.csv")
    table.write_text("image,question\na.png,one?\na.png,two?\n")
    answer = vlmpipe("predict", "r", str(table))
    assert answer.out == f"{picture}  one?  \u241b[2JONE? \u2407\n{picture}  two?  \u241b[2JTWO? \u2407\n"


def test_a_missing_picture_is_said_before_a_model_is_loaded(vlmpipe: Vlmpipe, picture: Path) -> None:
    answer = vlmpipe("ask", "r", str(picture.with_name("gone.png")), "what?")
    assert answer.code == 64 and "gone.png" in answer.err
