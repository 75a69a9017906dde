"""The step deploy-model of a local run, over the files of a real run folder; the server is a strict fake."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.chat_model import ChatModelServer
from tests.support.reports import make_run, write_json
from vlmpipe.components.deploy_model import deploy_model
from vlmpipe.components.runtime.deploy import deploy_run
from vlmpipe.records.registered import Registered
from vlmpipe.serving.openai import CHAT_PATH
from vlmpipe.serving.questions import validation_questions
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.serving import local_server
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record_file

ASKED = 6


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A registered run that deploys."""
    run = make_run(tmp_path)
    write_json(next((tmp_path / "prepared").iterdir()) / "tokenizer/chat.json", {"as_text": True})
    settings = json.loads((run / "run.json").read_text())
    write_json(run / "run.json", {**settings, "deploy": {"endpoint": "digits", "smoke_questions": ASKED}})
    return run


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def serve_by(monkeypatch: pytest.MonkeyPatch, run: Path, answer: Callable[[str], str]) -> list[ChatModelServer]:
    """A server in the place of transformers' own, which answers a question's text. Returns those that were started."""
    started = []

    @contextlib.contextmanager
    def serving(run_uri: str, quantized: str = "") -> Iterator[SimpleNamespace]:
        assert run_uri == str(run) and quantized == (read_json(run / "run.json")["deploy"].get("quantized") or "")
        with ChatModelServer("digits", answer) as server:
            started.append(server)
            yield SimpleNamespace(url=server.url.removesuffix(CHAT_PATH), model="digits")

    monkeypatch.setattr(local_server, "serving", serving)
    return started


def evaluated(run: Path) -> Callable[[str], str]:
    """The evaluation's answers, in the order in which they are asked."""
    answers = iter([one.evaluated for one in validation_questions(str(run), ASKED)])
    return lambda _question: next(answers)


def test_a_local_run_is_deployed_by_asking_its_server(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = serve_by(monkeypatch, run, evaluated(run))
    assert deploy_model(str(run), "local") == str(run)
    assert [server.asked for server in started] == [ASKED]
    deployed: dict[str, Any] = read_record_file(run / "deployed.json")
    assert deployed == {
        "server": "transformers serve", "model": "digits", "asked": ASKED, "agreement": 1.0, "disagreements": [],
            "cut_in_a_character": 0, "with_white_space": 0, "finish_not_compared": ASKED,
    }  # fmt: skip
    step = json.loads((run / "steps/deploy-model.json").read_text())
    assert (step["state"], step["message"]) == (
        "done",
        f"{ASKED} of {ASKED} validation questions answered as in evaluation "
        f"({ASKED} without a reason for their end to compare)",
    )


def test_a_model_that_answers_otherwise_is_not_deployed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by(monkeypatch, run, lambda question: "something else")
    with pytest.raises(SystemExit) as ended:
        deploy_model(str(run), "local")
    assert ended.value.code == ExitCode.REJECTED
    assert not (run / "deployed.json").exists()
    assert json.loads((run / "steps/deploy-model.json").read_text())["state"] == "failed"


def test_a_quantized_export_is_deployed_if_it_was_registered(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_json(run / "run.json")
    write_json(run / "run.json", {**settings, "deploy": {**settings["deploy"], "quantized": "int4"}})
    started = serve_by(monkeypatch, run, evaluated(run))
    with pytest.raises(UserError, match="has no int4 export") as caught:
        deploy_run(str(run), "local")
    assert caught.value.code == ExitCode.REJECTED and started == []
    registered = Registered.require(open_storage(str(run)))
    registered.model_copy(update={"quantized": {"int4": "there/model-int4"}}).write(open_storage(str(run)))
    deploy_run(str(run), "local")
    assert read_record_file(run / "deployed.json")["quantized"] == "int4" and len(started) == 1


def test_an_unregistered_model_is_not_deployed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = serve_by(monkeypatch, run, evaluated(run))
    (run / "registered.json").unlink()
    with pytest.raises(ConfigError, match=r"no .*registered\.json"):
        deploy_run(str(run), "local")
    assert started == []
