"""A question and its answer under keys of their own, with the options of a multiple-choice question."""

from __future__ import annotations

import ast
import re
import string

from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.message_parts import kind_of, text
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.text_files.json_stream import BadJsonError, parse_json

LISTS = ("options", "choices")  # of MMMU, AI2D, ScienceQA, MathVista
# Columns A, B, ... of MMBench, choice_a, ... of SEED-Bench
LETTERED = (
    tuple(string.ascii_uppercase),
    *(tuple(f"{prefix}_{letter}" for letter in string.ascii_lowercase) for prefix in ("choice", "option")),
)
ALL_LETTERED = frozenset().union(*LETTERED)
HINT = "hint"
MIN_OPTIONS = 2
LONGEST_LIST_CHARS = 1 << 16  # of options that are written as a text
NUMBER = re.compile(r"\s*[-+]?\d+\s*")
IGNORE = "if it is not needed, name it in data.columns.ignored"


def asked(record: Record) -> tuple[str, str]:
    """The question, after a hint and before its options, one a line, and the answer.

    An answer that is a whole number next to options is the number of one, from 0, and becomes its letter. Raises
    RejectedError.
    """
    question, options = _plain(record, "question"), _options(record)
    lines = [text(record[HINT], HINT)] if record.peek(HINT) else []
    lines.append(question)
    if not _has_all(question, options):
        lines += [f"{letter}. {option}" for letter, option in options.items()]
    return "\n".join(lines), _answer(record, options) if options else _plain(record, "answer")


def _plain(record: Record, key: str) -> str:
    """A question or an answer, which may be a whole number, or a list of one text."""
    value = record.get(key)
    if value is None and record.has(f"{key}s"):
        message = f"{key!r} is missing beside '{key}s', of which training needs one: add it as {key!r}"
        raise RejectedError(RejectCode.RECORD_FORM, message)
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else text(value, key)


def _answer(record: Record, options: dict[str, str]) -> str:
    value, answer = record.peek("answer"), _plain(record, "answer")
    letter = string.ascii_uppercase[value] if isinstance(value, int) and value in range(26) else ""
    if letter in options:
        if answer in options.values() and options[letter] != answer:
            message = f"'answer' is {answer}, which is an option and, from 0, the number of another one, {letter}"
            raise RejectedError(RejectCode.RECORD_FORM, f"{message}; write the letter of the right one")
        return letter
    if NUMBER.fullmatch(answer) and answer.strip() not in options.values():
        message = f"'answer' is {answer.strip()}, which is no option, nor the number of one as a number from 0"
        raise RejectedError(RejectCode.RECORD_FORM, f"{message}; write the letter or the text of the right one")
    return answer


def _options(record: Record) -> dict[str, str]:
    """Letters and options; empty for a question without any. Raises RejectedError."""
    name = next((name for name in LISTS if record.peek(name)), None)
    if name is not None:
        return _listed(record[name], name)
    if ALL_LETTERED.isdisjoint(record):  # nearly every record
        return {}
    for columns in LETTERED:
        names = [name for name in columns if record.peek(name) not in (None, "")]
        if len(names) >= MIN_OPTIONS:
            return {name[-1].upper(): _option(record[name], name) for name in names}
    return {}


def _listed(value: object, name: str) -> dict[str, str]:
    """Options as a list, also one that is written as a text, or by their letters."""
    is_text = isinstance(value, str)
    if isinstance(value, str) and len(value) <= LONGEST_LIST_CHARS and value.lstrip().startswith("["):
        value = _written(value.strip())
    if isinstance(value, list) and len(value) <= len(string.ascii_uppercase):
        value = dict(zip(string.ascii_uppercase, value, strict=False))
    if not isinstance(value, dict) or not value.keys() <= set(string.ascii_uppercase):
        message = f"{name!r} is {kind_of(value)}, not a list of at most 26 options; {IGNORE}"
        raise RejectedError(RejectCode.RECORD_FORM, message)
    if is_text and len(value) == 1:  # NumPy prints arrays so, without commas, and Python joins their texts
        message = f"{name!r} is a text of one option, maybe of several without commas between them; {IGNORE}"
        raise RejectedError(RejectCode.RECORD_FORM, message)
    return {letter: _option(option, name) for letter, option in value.items() if option not in (None, "")}


def _written(words: str) -> object:
    """A list as JSON writes it, or as Python prints it (MMMU); the words themselves where they are neither."""
    try:
        return parse_json(words)
    except BadJsonError:
        pass
    try:
        return ast.literal_eval(words)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return words


def _option(value: object, name: str) -> str:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else text(value, name)


def _has_all(question: str, options: dict[str, str]) -> bool:
    """Return whether the question has the options in their order already, each after its letter: `A. cat`, `(a)
    cat`.
    """
    at = 0
    for letter, option in options.items():
        marked = rf"(?<!\w)[{letter}{letter.lower()}]\s?[.:)\]、．：）]\s*{re.escape(option.strip())}(?!\w)"
        match = re.compile(marked).search(question, at)
        if match is None:
            return False
        at = match.end()
    return True
