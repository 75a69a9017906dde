"""Third-party text for people: names, keys and records of data, templates, settings of models, answers of servers.

A terminal obeys control characters, and marks of direction reorder what a person reads. Every process writes to its
terminal through `vlmpipe.trainer.redaction`, which lets none of them through.
"""

from __future__ import annotations

import re

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
