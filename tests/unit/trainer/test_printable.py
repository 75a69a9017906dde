"""No control character of third-party text reaches a terminal, by print, by an error or by a table."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from vlmpipe.cli.output import begin, print_json, print_lines, to_stderr
from vlmpipe.runs.terminal import TerminalConsole
from vlmpipe.trainer.data.rejects import Reject, RejectCode
from vlmpipe.trainer.errors import UserError, print_warning
from vlmpipe.trainer.printable import COLUMNS, one_line, printable, unsafe_characters, wrapped
from vlmpipe.trainer.redaction import hiding_secrets

HOSTILE = [
    "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]8;;https://evil.example\x1b\\here\x1b]8;;\x1b\\", "\x9b31m", "a\rb",
    "a\x08b", "\x1b[8mhidden\x1b[0m", "\u202egnp.exe", "\u2066\u2069", "\u200f", "\x7f", "\x00", "\u2028",
    "\x1bP1$r0m\x1b\\",
]  # fmt: skip
NAMES = [
    "Screenshot 2026-11-28 at 10.00.00\u202fAM.png", "a\u00a0b", "\u5168\u89d2\u3000\u7a7a\u767d.jpg",
    "\U0001f469\u200d\U0001f4bb.png", "caf\u00e9 \u00ad.png", "\u0645\u0644\u0641.png",
]  # fmt: skip


def in_table(text: str) -> None:
    table = Table(title=text)
    table.add_column(text)
    table.add_row(Text(text))
    console = TerminalConsole()
    console.print(table)
    console.print(text, markup=False)


def in_error(text: str) -> None:
    to_stderr(UserError(text, expected=text, fix=text).text())


def in_json(text: str) -> None:
    begin()
    print_json({text: text})


DOORS: dict[str, Callable[[str], None]] = {
    "print": print,
    "error": in_error,
    "warning": print_warning,
    "lines": lambda text: print_lines([text]),
    "table": in_table,
    "json": in_json,
    "reject": lambda text: print(Reject(text, "id", RejectCode.TEXT_EMPTY, text).sentence()),
}


def shown_by(door: str, text: str) -> str:
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream), hiding_secrets():
        DOORS[door](text)
    return stream.getvalue()


def control_characters(text: str) -> set[str]:
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or "\u202a" <= c <= "\u202e"} - {
        "\n",
        "\t",
    }


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_no_control_sequence_reaches_the_terminal(door: str, text: str) -> None:
    shown = shown_by(door, f"before {text} behind")
    # The end of a line of progress may be a carriage return.
    assert control_characters(shown) <= ({"\r"} if door in ("print", "lines", "warning") else set()), ascii(shown)
    if door == "json":
        assert json.loads(shown) == {f"before {text} behind": f"before {text} behind"}


@given(st.text(st.characters(), max_size=30))
def test_whatever_is_printed_is_printable(text: str) -> None:
    assert (
        not control_characters(printable(text))
        and not control_characters(one_line(text))
        and "\n" not in one_line(text)
    )
    assert printable(printable(text)) == printable(text)
    if not control_characters(text) and not unsafe_characters(text.replace("\n", "").replace("\t", "")):
        assert printable(text) == text


@pytest.mark.parametrize("name", NAMES)
def test_names_as_programs_and_people_give_them_are_safe_and_unchanged(name: str) -> None:
    assert not unsafe_characters(name) and printable(name) == name


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_control_characters_in_names_are_named(text: str) -> None:
    assert unsafe_characters(f"a{text}b").startswith("U+")


def test_our_own_colours_reach_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with contextlib.redirect_stdout(stream), pytest.MonkeyPatch.context() as patch, hiding_secrets():
        patch.setenv("TERM", "xterm-256color")
        patch.delenv("NO_COLOR", raising=False)
        console = TerminalConsole()
        console.print(Text("\x1b[2Jred", style="bold red"))
        sys.stdout.flush()
    assert "\x1b[1;31m" in stream.getvalue() and "\x1b[2J" not in stream.getvalue()


LONG = "and more words " * 10


@pytest.mark.parametrize("label", ["", "  cause:     ", "    7  "])
def test_a_long_line_is_broken_at_spaces_below_its_text(label: str) -> None:
    first, *more = wrapped(f"{label}{LONG.strip()}")
    indent = len(label) or 2
    assert first.startswith(f"{label}and more") and more
    assert max(map(len, (first, *more))) <= COLUMNS
    assert all(line[:indent].isspace() and not line[indent].isspace() for line in more)
    assert " ".join(" ".join((first, *more)).split()) == " ".join(f"{label}{LONG}".split())


@pytest.mark.parametrize(
    "line",
    [f"  continue: vlmpipe run digits.yaml {LONG}", f"vlmpipe plan {LONG}", f"  3  0.7  train.epochs=2 {LONG}"],
)
def test_what_is_copied_stays_in_its_line(line: str) -> None:
    assert wrapped(line) == [line]


def test_a_path_is_never_broken() -> None:
    path = "/folder" * 20
    assert f"  {path}" in wrapped(f"it is in {path} and {LONG}")
