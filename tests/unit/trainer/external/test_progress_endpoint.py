"""The endpoint that transformers' Trainer posts its progress to: shown, and never more than that."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import integration_utils

from vlmpipe.trainer.external.progress_endpoint import (
    MAX_BODY_BYTES,
    TOKEN,
    URL,
    Posted,
    ProgressEndpoint,
    platform_has_one,
)


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[ProgressEndpoint]:
    with ProgressEndpoint(tmp_path) as found:
        yield found


def posted(endpoint: ProgressEndpoint, body: bytes, token: str | None = None) -> int:
    token = Path(endpoint.variables[TOKEN]).read_text(encoding="utf-8") if token is None else token
    request = urllib.request.Request(endpoint.variables[URL], body, {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_transformers_own_callback_is_understood(
    endpoint: ProgressEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in endpoint.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", raising=False)
    callback = integration_utils.KubeflowCallback()
    monkeypatch.setattr(callback, "_MIN_UPDATE_INTERVAL", 0.0)
    arguments, control = TrainingArguments(str(tmp_path), use_cpu=True), TrainerControl()
    state = TrainerState(global_step=0, max_steps=40)
    callback.on_train_begin(arguments, state, control)
    assert endpoint.posted == Posted(total_steps=40)
    state.global_step = 16
    callback.on_log(arguments, state, control, logs={"loss": 2.5, "learning_rate": 1e-4})
    callback.on_step_end(arguments, state, control)
    assert endpoint.posted == Posted(16, 40, 2.5)
    callback.on_train_end(arguments, state, control)  # early: it posts 100 % all the same
    assert endpoint.posted == Posted(16, 40, 2.5)


def test_nobody_else_is_believed(endpoint: ProgressEndpoint) -> None:
    body = b'{"trainerStatus": {"metrics": [{"name": "current_step", "value": "7"}]}}'
    assert [posted(endpoint, body, token) for token in ("", "wrong", "\u00e9")] == [401] * 3
    assert endpoint.posted == Posted()
    assert posted(endpoint, body) == 200
    assert endpoint.posted == Posted(step=7)
    token_file = Path(endpoint.variables[TOKEN])
    assert token_file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 400),
        (b"not json", 400),
        (b'{"trainerStatus": 1}', 400),
        (b'{"trainerStatus": {"metrics": {}}}', 400),
        (b'{"trainerStatus": {"metrics": [1, {"name": "current_step", "value": "nan"}]}}', 200),
        (b'{"trainerStatus": {"metrics": [{"name": "loss"}, {"name": "total_steps", "value": "many"}]}}', 200),
    ],
)
def test_what_is_not_of_the_form_changes_nothing(endpoint: ProgressEndpoint, body: bytes, code: int) -> None:
    assert posted(endpoint, body) == code
    assert endpoint.posted == Posted()


@pytest.mark.parametrize(("length", "code"), [(MAX_BODY_BYTES + 1, 413), ("-1", 411), ("", 411)])
def test_a_body_without_a_bound_is_not_read(endpoint: ProgressEndpoint, length: int | str, code: int) -> None:
    port = int(endpoint.variables[URL].rstrip("/").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode())
        assert client.recv(100).split()[1] == str(code).encode()


def test_it_listens_on_this_machine_only_and_closes(tmp_path: Path) -> None:
    with ProgressEndpoint(tmp_path) as endpoint:
        host, _, port = endpoint.variables[URL].removeprefix("http://").rstrip("/").partition(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port)), timeout=5).close()
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), timeout=5)


def test_a_platforms_own_endpoint_is_left_to_it() -> None:
    assert platform_has_one({URL: "https://kubeflow"}) and not platform_has_one({})
