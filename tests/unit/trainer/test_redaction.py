"""Secrets of known forms are hidden in whatever is printed; all other text comes through unchanged."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.paths import ROOT
from tests.support.short_form import WHOLE
from vlmpipe.platforms.jobs.step_record import recorded_job
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, run_main
from vlmpipe.trainer.redaction import HIDDEN, Redactor, hiding_secrets, redact, redact_all
from vlmpipe.trainer.secret_detection import GITLEAKS_RULES_FILE, Form, forms
from vlmpipe.trainer.storage.local import LocalStorage

TOKEN = "hf_" + "aB3dE5fG7hI9jK1lM3nO5pQ7rS9tU1vW3x"
KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQ==\n-----END PRIVATE KEY-----\n"
LEGACY = KEY.replace("PRIVATE", "RSA PRIVATE").replace("KEY-----\nMII", "KEY-----\nProc-Type: 4,ENCRYPTED\n\nMII", 1)
SECRETS = [
    TOKEN,
    "sk-proj-" + 40 * "a",
    "ghp_" + 36 * "a",
    "glpat-" + 20 * "a",
    "AIza" + 35 * "a",
    "ya29." + 30 * "a",
    "AKIA" + 16 * "A",
    "xoxb-1234567890-abc",
    "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK",
    "GOCSPX-" + 28 * "a",
    "pypi-" + 60 * "a",
    "npm_" + 36 * "a",
    "postgres://user:letmein@",
    "github_pat_" + 50 * "a",
    "xapp-1-A0123456789",
    "hooks.slack.com/services/T00000000/B00000000/" + 24 * "X",
    "hooks.slack.com/triggers/E1/2/" + 32 * "a",
    "discord.com/api/webhooks/123456789012345678/" + 68 * "a",
    "discordapp.com/api/v10/webhooks/1234567890/" + 68 * "a",
    "webhook.office.com/webhookb2/" + 36 * "a" + "@" + 36 * "b" + "/IncomingWebhook/" + 32 * "c",
    "chat.googleapis.com/v1/spaces/AAAA/messages?key=" + 39 * "a" + "&token=" + 43 * "b",
    "?sig=" + 43 * "a",
    "Signature=" + 8 * "0a1b2c3d",
    "&X-Goog-Signature=" + 64 * "a",
    "SG." + 22 * "a" + "." + 43 * "b",
    "hvs." + 90 * "a",
    "hvb." + 90 * "a",
    "1//0g" + 60 * "a",
    "sk_live_" + 24 * "a",
    "dckr_pat_" + 27 * "a",
    "AccountKey=" + 86 * "a" + "==",
    "Bearer abcdefghijklmnop1234",
    "bearer  aB3.dE5-fG7/hI9+jK1==",
    "BEARER " + 40 * "0",
    "Bearer%20" + 40 * "0",
    "Authorization: Basic dXNlcjpwYXNzd29yZA==",
    "https://x0123456789abcdefghij@",
    "X-Goog-Signature=" + 64 * "a",
    "wandb_v1_" + 40 * "aB3",
    "&x-goog-signature=" + 64 * "a",
    "?Signature=" + 40 * "a~",
    "&key=" + 20 * "a1",
    "?code=" + 20 * "a1",
    "api.telegram.org/bot123456789:" + 35 * "a",
    "Authorization: token " + 20 * "a1",
    "authorization=ApiKey " + 20 * "a1",
    "%3A%2F%2Fuser%3Aletmein%40",
]
COOKIE = "Cookie: session=" + 20 * "a1" + "; user=ann"  # to the line's end
GLUED = [
    one
    for one in SECRETS
    if one.startswith(("hf_", "ghp_", "github_pat_", "glpat-", "AIza", "ya29.", "GOCSPX-", "pypi-"))
]
AFTER_WORDS = ["wandb login ", "wandb login --relogin ", "W&B API key: ", "machine api.wandb.ai login u password "]
ADDRESSES = [
    "postgres://user:pa$$word@", "redis://:a:b:c@", "HTTPS://user:letmein@", "Amqp+SSL://user:$ecret@",
    "mysql://user:pa@ss@", "mysql://user:p/a?s#s@", "smtp://ann@example.com:letmein@", "ftp://u:12345@",
    "postgres://user:let$me@", "redis://:secret@",
]  # fmt: skip
NO_SECRETS = [
    "postgres://user:$PASSWORD@host", "postgres://user:${PASSWORD}@host", "postgres://user:$(cat password)@host",
    "http://localhost:4873/@scope/package", "host:5000/image@sha256:" + 64 * "0", "https://user@host/x",
    '{"url":"http://localhost:8080","mail":"ann@example.com"}', "http://[::1]:8080/@scope", "a bearer of bad news",
    "Bearer authentication/authorization", "https://hooks.slack.com/services/...", "https://hooks.slack.com/services/a",
    "https://discord.com/api/webhooks/", "1//2", "https://example.com/1//2", "a.b.c", "hvs.short", "SG.1.2",
    "cookie: yes", "/search?key=name&code=de", "Authorization: required by the server", "http%3A%2F%2Flocalhost%3A8080",
]  # fmt: skip
ASSIGNED = [  # in each, the value is the secret
    "WANDB_API_KEY=", "AWS_SECRET_ACCESS_KEY=", '"client_secret": "', "password: ", "--hf-token ", "--password=",
    "https://example.com/?api_key=", "export HF_TOKEN='", "my_passwd = ",
    "PGPASSWORD=", "MYSQL_PWD=",
]  # fmt: skip
VALUES = ["wJalrXUtnFEMI/K7MDENG", 40 * "0a", "hunter2"]
NOT_ASSIGNED = [
    "image_token: 151655", "eos_token=</s>", "pad_token: [PAD]", "HF_TOKEN=$TOKEN", "token: str", "sort_key=column12",
    "webhook_secret: projects/p1/secrets/s1/versions/1", "PASSWORD=none", "a token: something", "--hf-token",
    "API_KEY=/run/secrets/key1", "label_tokens=123456a", "api_key=os.environ", "image_token_id=1a2b3c4d",
]  # fmt: skip
OWN_FORMS = [form for form in forms() if form.name[0].isupper() or " " in form.name]
GITLEAKS_FORMS = [form for form in forms() if form not in OWN_FORMS]


def name_of(form: Form) -> str:
    return form.name


@pytest.mark.parametrize("secret", SECRETS)
def test_known_form_is_hidden_without_its_surroundings(secret: str) -> None:
    assert redact(f"found {secret} in a line\n") == f"found {HIDDEN} in a line\n"


@pytest.mark.parametrize("secret", GLUED)
def test_letters_before_a_token_do_not_show_it(secret: str) -> None:
    assert redact(f"found x{secret} in a line\n") == f"found x{HIDDEN} in a line\n"


@pytest.mark.parametrize("words", AFTER_WORDS)
def test_a_bare_key_of_weights_and_biases_is_hidden_where_the_words_before_it_say_so(words: str) -> None:
    assert redact(f"{words}{20 * '0a'} in a line\n") == f"{words}{HIDDEN} in a line\n"
    assert redact(f"commit {20 * '0a'}\n") == f"commit {20 * '0a'}\n"


def test_all_of_a_cookie_is_hidden() -> None:
    assert redact(f"> {COOKIE}\n< set-{COOKIE}\nnext\n") == f"> {HIDDEN}\n< {HIDDEN}\nnext\n"


def test_a_signature_at_the_start_of_a_line_is_hidden() -> None:
    assert redact(f"X-Goog-Signature={64 * 'a'}\nnext\n") == f"{HIDDEN}\nnext\n"


@pytest.mark.parametrize("address", ADDRESSES)
def test_any_password_in_an_address_is_hidden(address: str) -> None:
    assert redact(f"connecting to {address}host/path\n") == f"connecting to {HIDDEN}host/path\n"


@pytest.mark.parametrize("name", ASSIGNED)
@pytest.mark.parametrize("value", VALUES)
def test_what_is_assigned_to_a_secrets_name_is_hidden(name: str, value: str) -> None:
    assert redact(f"found {name}{value} in a line\n") == f"found {name}{HIDDEN} in a line\n"
    for cut in range(len(value)):
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), hiding_secrets():
            print(f"found {name}{value[:cut]}", end="", flush=True)
            assert stream.getvalue() in f"found {name}{value[:1]}", "a prompt may end so"
            print(value[cut:], "in a line")
        assert stream.getvalue() == f"found {name}{HIDDEN} in a line\n"


@pytest.mark.parametrize("secret", [TOKEN, "postgres://user:letmein@", "WANDB_API_KEY=" + 40 * "0a"])
def test_colors_hide_no_secret(secret: str) -> None:
    middle = len(secret) // 2
    for text in (f"\x1b[31m{secret}\x1b[0m", f"{secret[:middle]}\x1b[1;32m{secret[middle:]}\x1b[0m"):
        assert redact(text) == redact(secret)
    assert redact("\x1b[31mred\x1b[0m") == "\x1b[31mred\x1b[0m"


@pytest.mark.parametrize("text", [*NO_SECRETS, *NOT_ASSIGNED])
def test_text_that_resembles_a_secret_is_shown(text: str) -> None:
    assert redact(text) == text


def test_every_published_gitleaks_rule_is_taken_or_left_out_for_a_reason() -> None:
    published = (ROOT / "tests/fixtures/gitleaks_rule_names.txt").read_text().splitlines()
    ours = json.loads(GITLEAKS_RULES_FILE.read_text())
    assert published[0].endswith(ours["source"].rpartition(", ")[2]), "the same version"
    assert [form.name for form in GITLEAKS_FORMS] == list(ours["rules"])
    names = [*ours["rules"], *ours["known_by_a_name_beside_them"], *ours["other_rules_left_out"]]
    assert sorted(names) == sorted(published[1:])


# Long minimum lengths make examples costly to generate.
@pytest.mark.parametrize("form", [form for form in GITLEAKS_FORMS if len(form.regex) < 200], ids=name_of)
def test_whatever_a_gitleaks_rule_matches_is_hidden(form: Form) -> None:
    @settings(max_examples=2, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.from_regex(form.regex, fullmatch=True))
    def check(secret: str) -> None:
        assert secret not in redact(f"found {secret} in a line")

    check()


@pytest.mark.parametrize("prefix", ["INFO: ", "2026-11-23 10:00:{:02d},123 [rank{:d}] trainer.x:{:d} - ", "| "])
@pytest.mark.parametrize("key", [KEY, LEGACY], ids=["key", "legacy"])
def test_private_key_behind_a_log_prefix_is_hidden(prefix: str, key: str) -> None:
    lines = [prefix.format(*3 * [number]) + line for number, line in enumerate(key.splitlines(), start=8)]
    found = redact("\n".join([*lines, prefix.format(99, 99, 99) + "done"]))
    assert found == f"{prefix.format(8, 8, 8)}{HIDDEN}\n{prefix.format(99, 99, 99)}done"


def test_key_text_between_other_lines_is_hidden() -> None:
    body = [64 * "a", 64 * "B", 64 * "c"]
    text = "\n".join(["-----BEGIN PRIVATE KEY-----", body[0], "loss 0.5", body[1], f'{{"msg": "{body[2]}"}}', "lr 0.1"])
    assert redact(text) == f'{HIDDEN}\nloss 0.5\n{HIDDEN}\n{{"msg": "{HIDDEN}"}}\nlr 0.1'


@pytest.mark.parametrize("key", [KEY, LEGACY], ids=["key", "legacy"])
def test_private_key_is_hidden_to_its_last_line(key: str) -> None:
    text = f"before\n{key}after it\n"
    assert redact(text) == f"before\n{HIDDEN}\nafter it\n"
    assert "".join(map(Redactor(), text.splitlines(keepends=True))) == redact(text)


def test_key_in_json_is_hidden_and_the_rest_of_its_line_is_shown() -> None:
    text = '{"id": 1, "key": "' + KEY.replace("\n", "\\n") + '", "next": 2}'
    assert redact(text) == '{"id": 1, "key": "' + HIDDEN + '\\n", "next": 2}'


def test_text_after_an_unfinished_key_is_shown() -> None:
    text = "-----BEGIN PRIVATE KEY-----\nMIIEvQ\nerror: no end\nMIIEvQ\n"
    assert redact(text) == f"{HIDDEN}\nerror: no end\nMIIEvQ\n"


@given(st.text(st.sampled_from("abz09 _-:/@.\n\"'{}ABEGIN\N{GREEK SMALL LETTER ALPHA}"), max_size=200))
def test_text_without_a_known_form_is_unchanged(text: str) -> None:
    if not any(form.pattern.search(text) for form in forms()):
        assert redact(text) == text


def test_records_are_redacted_except_for_their_keys() -> None:
    record = {"step": "train", "done": 1, "detail": {"error": f"no {TOKEN}", "list": [TOKEN, None, 0.5]}}
    assert redact_all(record) == {
        "step": "train", "done": 1, "detail": {"error": f"no {HIDDEN}", "list": [HIDDEN, None, 0.5]},
    }  # fmt: skip


def test_output_and_traceback_of_a_process_are_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        print("token", TOKEN)
        print(f"found {TOKEN}", file=sys.stderr)
        raise RuntimeError(f"refused: {TOKEN}")

    assert run_main(main) == ExitCode.UNEXPECTED
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == (f"token {HIDDEN}\n", f"found {HIDDEN}")
    assert err.splitlines()[-1] == f"unexpected error: RuntimeError: refused: {HIDDEN}"
    assert TOKEN not in err


def test_user_errors_are_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise ConfigError(f"found {TOKEN}", fix="take it out")

    assert run_main(main) == ExitCode.CONFIG
    assert capsys.readouterr().err == f"error: found {HIDDEN}\n  to do:    take it out\n"


def test_streams_are_restored_and_keep_their_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
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


@given(data=st.data(), secret=st.sampled_from([*SECRETS, *ADDRESSES]))
def test_secret_in_several_writes_is_hidden(data: st.DataObject, secret: str) -> None:
    text = f"before\nfound {secret} in a line\nafter"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), hiding_secrets():
        for start, end in itertools.pairwise([0, *cuts, len(text)]):
            sys.stdout.write(text[start:end])
    assert stream.getvalue() == redact(text)


@pytest.mark.parametrize("secret", [*SECRETS, *ADDRESSES])
def test_flush_within_a_secret_shows_at_most_its_first_characters(secret: str) -> None:
    line = f"found {HIDDEN} in a line\n"
    for cut in range(len(secret)):
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), hiding_secrets():
            print("found ", end="")
            print(secret[:cut], end="", flush=True)
            print(secret[cut:], "in a line")
        found = stream.getvalue()
        shown = found.removeprefix("found ").removesuffix(line.removeprefix("found "))
        assert secret.startswith(shown) and len(shown) <= len("Authorization: Basic "), "the longest keywords"


@given(st.lists(st.sampled_from(["s", "k-", "hf_", "bearer", " ", "x", "://", "a:b", "\r", "\n", "-----BEGIN "])))
def test_flushed_text_without_a_secret_is_written_once(pieces: list[str]) -> None:
    text, stream = "".join(pieces), io.StringIO(newline="")
    with contextlib.redirect_stdout(stream), hiding_secrets():
        for piece in pieces:
            print(piece, end="", flush=True)
    assert stream.getvalue() == redact(text)


def test_prompt_appears_when_flushed() -> None:
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), hiding_secrets():
        print("Continue? [y/N] ", end="", flush=True)
        assert stream.getvalue() == "Continue? [y/N] "
        for _ in range(3):
            print(".", end="", flush=True)
        assert stream.getvalue() == "Continue? [y/N] ..."
        print("yes")
    assert stream.getvalue() == "Continue? [y/N] ...yes\n"


def test_progress_bar_appears_at_each_carriage_return() -> None:
    stream = io.StringIO(newline="")
    with contextlib.redirect_stdout(stream), hiding_secrets():
        sys.stdout.write("10 %\r")
        assert stream.getvalue() == "10 %\r"


WITHOUT_NEWLINE = """
import os, signal, sys
from vlmpipe.trainer.redaction import hide_secrets
hide_secrets()
sys.stdout.write("whole line\\n10 % of sk-")
{end}
"""


@pytest.mark.parametrize(("unbuffered", "end", "shown"), [
    ("", "", "whole line\n10 % of sk-"),
    ("", "sys.exit(3)", "whole line\n10 % of sk-"),
    ("1", "os.kill(os.getpid(), signal.SIGTERM)", "whole line\n10 % of "),
    ("1", "os._exit(3)", "whole line\n10 % of "),
    ("", "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)", "whole line\n10 % of "),
])  # fmt: skip
def test_process_loses_no_output_however_it_ends(unbuffered: str, end: str, shown: str) -> None:
    command = [sys.executable, "-c", WITHOUT_NEWLINE.format(end=end)]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    assert subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False).stdout == shown


@pytest.mark.parametrize("form", OWN_FORMS, ids=name_of)
def test_search_time_is_linear_in_the_text(form: Form) -> None:
    def cpu_s(text: str) -> float:
        started_s = time.process_time()
        form.pattern.search(text)
        return time.process_time() - started_s

    for unit in _hostile(form):
        quarter, whole = (unit * (size // len(unit)) for size in (15_000, 60_000))
        # A quadratic search takes seconds, sixteen times as long as that of a quarter.
        assert cpu_s(whole) < 0.1 or min(cpu_s(whole) for _ in range(3)) < 8 * min(cpu_s(quarter) for _ in range(3))


def test_search_time_for_assignments_is_linear_in_the_text() -> None:
    for unit in ("api_key=", "a=", "token: ", "--hf-token ", "a" * 80, "-", 'secret": "'):
        started_s = time.process_time()
        redact(unit * (60_000 // len(unit)))
        assert time.process_time() - started_s < 2


def _hostile(form: Form) -> set[str]:
    """Beginnings of the form, to be repeated: each could be the start of a match that then fails."""
    known = [secret for secret in [*SECRETS, *ADDRESSES, KEY, COOKIE] if form.pattern.search(secret)]
    assert known, f"no example of {form.name}"
    ends = [
        (secret, end)
        for secret in known[: 2 if WHOLE else 1]
        for end in range(1, min(len(secret), 40), 1 if WHOLE else 2)
    ]
    return {secret[:end] + between for secret, end in ends for between in ("", "-", " ")} | {"a:", "://:@", "a://b:"}


def test_error_in_a_step_record_is_redacted(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    with pytest.raises(UserError), recorded_job(store, "train") as record:
        record.open()
        raise UserError(f"refused {TOKEN}")
    text = store.read("steps/train.json").decode()
    assert TOKEN not in text and text.count(f"refused {HIDDEN}") == 2
