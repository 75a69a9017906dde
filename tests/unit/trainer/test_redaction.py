"""Secrets of known forms do not reach what is printed, whoever prints them; everything else does, letter by letter."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import ConfigError, ExitCode, run_main
from trainer.redaction import HIDDEN, Redactor, hiding_secrets, redact, redact_all
from trainer.secret_detection import forms
from trainer.storage.local import LocalStorage
from vlmpipe.backends.step_record import close_record, open_record

TOKEN = "hf_" + "aB3dE5fG7hI9jK1lM3nO5pQ7rS9tU1vW3x"
KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQ==\n-----END PRIVATE KEY-----\n"
LEGACY = KEY.replace("PRIVATE", "RSA PRIVATE").replace("KEY-----\nMII", "KEY-----\nProc-Type: 4,ENCRYPTED\n\nMII", 1)
SECRETS = [
    TOKEN, "sk-proj-" + 40 * "a", "ghp_" + 36 * "a", "glpat-" + 20 * "a", "AIza" + 35 * "a", "ya29." + 30 * "a",
    "AKIA" + 16 * "A", "xoxb-1234567890-abc", "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK", "GOCSPX-" + 28 * "a",
    "pypi-" + 60 * "a", "npm_" + 36 * "a", "postgres://user:letmein@",
    "postgres://user:let$me@", "postgres://user:let:me:in@", "POSTGRES://user:letmein@", "redis://:secret@",
    "hooks.slack.com/services/" + "T00000000/B00000000/" + 24 * "x", "SG." + 22 * "a" + "." + 43 * "b",
    "discord.com/api/webhooks/123456789012345678/" + 60 * "a", "hvs." + 40 * "a", "1//" + 50 * "a",
    "Bearer " + 30 * "a", "bearer " + 30 * "b" + "==",
]  # fmt: skip


@pytest.mark.parametrize("secret", SECRETS)
def test_every_known_form_is_hidden_and_what_stands_around_it_is_not(secret: str) -> None:
    assert redact(f"found {secret} in a line\n") == f"found {HIDDEN} in a line\n"


@pytest.mark.parametrize("key", [KEY, LEGACY], ids=["key", "legacy"])
def test_a_private_key_is_hidden_to_its_last_line_however_it_is_cut(key: str) -> None:
    text = f"before\n{key}after it\n"
    assert redact(text) == f"before\n{HIDDEN}\nafter it\n"
    lines, pieces = Redactor(), text.splitlines(keepends=True)
    assert "".join(map(lines, pieces)) == redact(text)


@pytest.mark.parametrize("prefix", ["2026-11-23 10:00:00 INFO db: ", "[worker 1] "])
def test_a_private_key_behind_a_prefix_of_each_line_is_hidden(prefix: str) -> None:
    body = [64 * "M", 64 * "a", "hkiG9w0BAQ=="]
    lines = ["-----BEGIN PRIVATE KEY-----", *body, "-----END PRIVATE KEY-----", "done"]
    shown = redact("".join(f"{prefix}{line}\n" for line in lines))
    assert shown == f"{prefix}{HIDDEN}\n{prefix}done\n"


@pytest.mark.parametrize("reference", ["postgres://user:$PASSWORD@db", "postgres://user:${PASSWORD}@db"])
def test_a_variable_in_the_place_of_a_password_is_shown(reference: str) -> None:
    assert redact(reference) == reference


PUMPED = ["eyJ", "eyJaaaaaaaa.", "-eyJaaaaaaaaa", "-----BEGIN ", "a://", "a://b:", "://:@", "sk-", "xoxb-", "SG.a",
          "1//a", "Bearer ", "hf_", "a:", "discord.com/api/webhooks/1"]  # fmt: skip


@pytest.mark.parametrize("piece", PUMPED)
def test_looking_for_secrets_takes_time_in_proportion_to_the_text(piece: str) -> None:
    def seconds(size: int) -> float:
        text, taken = piece * (size // len(piece)), []
        for _ in range(3):
            start = time.process_time()
            for form in forms().values():
                form.pattern.search(text)
            taken.append(time.process_time() - start)
        return min(taken)

    # Four times the text takes four times as long, or sixteen times where the time grows with its square.
    assert seconds(120_000) < 8 * seconds(30_000) + 0.05


def test_a_key_in_json_is_hidden_and_the_rest_of_its_line_is_not() -> None:
    text = '{"id": 1, "key": "' + KEY.replace("\n", "\\n") + '", "next": 2}'
    assert redact(text) == '{"id": 1, "key": "' + HIDDEN + '\\n", "next": 2}'


def test_after_a_key_without_an_end_other_words_are_shown_again() -> None:
    assert (
        redact("-----BEGIN PRIVATE KEY-----\nMIIEvQ\nerror: no end\nMIIEvQ\n") == f"{HIDDEN}\nerror: no end\nMIIEvQ\n"
    )


@given(st.text(st.sampled_from("abz09 _-:/@.\n\"'{}ABEGIN\N{GREEK SMALL LETTER ALPHA}"), max_size=200))
def test_what_has_no_known_form_comes_through_unchanged(text: str) -> None:
    if not any(form.pattern.search(text) for form in forms().values()):
        assert redact(text) == text


def test_texts_in_records_are_redacted_and_their_keys_are_kept() -> None:
    record = {"step": "train", "done": 1, "detail": {"error": f"no {TOKEN}", "list": [TOKEN, None, 0.5]}}
    assert redact_all(record) == {
        "step": "train", "done": 1, "detail": {"error": f"no {HIDDEN}", "list": [HIDDEN, None, 0.5]},
    }  # fmt: skip


def test_a_process_shows_no_secret_in_what_it_prints_nor_in_its_errors(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        print("token", TOKEN)
        print(f"told {TOKEN}", file=sys.stderr)
        raise RuntimeError(f"refused: {TOKEN}")

    assert run_main(main) == ExitCode.UNEXPECTED
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == (f"token {HIDDEN}\n", f"told {HIDDEN}")
    assert err.splitlines()[-1] == f"unexpected error: RuntimeError: refused: {HIDDEN}"
    assert TOKEN not in err


def test_an_error_for_people_shows_none_either(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise ConfigError(f"found {TOKEN}", fix="take it out")

    assert run_main(main) == ExitCode.CONFIG
    assert capsys.readouterr().err == f"error: found {HIDDEN}\n  to do:    take it out\n"


def test_the_streams_are_put_back_and_answer_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    with hiding_secrets():
        with hiding_secrets():
            assert (sys.stdout.encoding, sys.stdout.isatty(), sys.stdout.writable()) == ("utf-8", False, True)
            sys.stdout.writelines([f"{TOKEN}\n", "plain\n"])
        assert print("still inside", TOKEN) is None
    assert sys.stdout is stream
    stream.seek(0)
    assert stream.read() == f"{HIDDEN}\nplain\nstill inside {HIDDEN}\n"


def test_the_record_of_a_job_hides_what_its_failure_quotes(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    started_s = open_record(store, "train")
    close_record(store, "train", "failed", f"refused {TOKEN}", started_s, {"error": f"refused {TOKEN}"})
    text = store.read("steps/train.json").decode()
    assert TOKEN not in text and text.count(f"refused {HIDDEN}") == 2
