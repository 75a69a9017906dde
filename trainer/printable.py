"""Third-party text for people: names, keys and records of data, templates, settings of models, answers of servers.

A terminal obeys control characters, and marks of direction reorder what a person reads. Every process writes to its
terminal through `vlmpipe.trainer.redaction`, which lets none of them through.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap

COLUMNS = 100  # of every screen, also in a wider terminal, a pipe and a file: longer lines are hard to follow
LABEL_COLUMNS = 40
# A line is copied as a whole where it is a command or overrides, or ends with them after a label.
_COMMAND = re.compile(r"(?:^|\s{2}|:)\s*(?:(?:vlmpipe|gcloud|kubectl|docker|python|pip) \S|(?:\w+\.)+\w+=\S)")
_LABEL = re.compile(rf".{{0,{LABEL_COLUMNS - 2}}}\S\s{{2,}}")

# Unicode's control characters but for line end and tab, its marks of direction (UAX #9, 2), its separators of lines,
# and halves of characters. Spaces of all widths, joiners and marks of emoji are harmless.
_RANGES = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL = re.compile(f"[{_RANGES}]")
_UNSAFE = re.compile(f"[{_RANGES}\t\n]")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PICTURES = 0x2400  # of the first 32 control characters, in Unicode's order
_DELETE, _DELETE_PICTURE = "\x7f", "\u2421"
_REPLACEMENT = "\ufffd"


def printable(text: str, *, keep: str = "") -> str:
    """The text with a visible character in place of each control character but line ends, tabs and those of `keep`.

    Colours are left out.
    """
    if not _CONTROL.search(text):
        return text
    return _CONTROL.sub(lambda match: match[0] if match[0] in keep else _picture(match[0]), _COLOURS.sub("", text))


def columns() -> int:
    """Return the columns of a screen: the terminal's, at most COLUMNS; COLUMNS in a pipe or a file."""
    return min(shutil.get_terminal_size().columns, COLUMNS) if sys.stdout.isatty() else COLUMNS


def wrapped(line: str) -> list[str]:
    """Break a line at spaces to fit the screen; what follows a label continues below its text.

    Commands, paths and addresses stay whole, however long: they are copied.
    """
    if len(line) <= columns() or _COMMAND.search(line):
        return [line]
    label = _LABEL.match(line)
    indent = label.end() if label else len(line) - len(line.lstrip()) + 2
    return textwrap.wrap(
        line, columns(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def one_line(text: str) -> str:
    """Return the text printable and in one line."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def unsafe_characters(name: str) -> str:
    """Control characters and marks of direction in a name, as escapes; "" for none. A name has no line ends."""
    characters = dict.fromkeys(_UNSAFE.findall(name))
    return ", ".join(f"U+{ord(character):04X}" for character in characters)


def escaped_in_json(text: str) -> str:
    """JSON text with escapes in place of control characters that JSON leaves as they are."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _picture(character: str) -> str:
    if ord(character) < 0x20:
        return chr(_PICTURES + ord(character))
    return _DELETE_PICTURE if character == _DELETE else _REPLACEMENT
