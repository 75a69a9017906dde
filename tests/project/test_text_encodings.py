"""Every text that is read or written names its encoding: the locale's is another on another machine.

Ruff's PLW1514 is a rule in preview, infers the types of few paths, and does not look at the pipes of subprocesses.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT

SHIPPED = ("vlmpipe", "trainer", "pipelines", "components", "container", "recipes", "benchmarks", "examples")
LINKS = ("vlmpipe/trainer/", "vlmpipe/pipelines/", "vlmpipe/components/")
MODE_LETTERS = frozenset("rwaxbt+")
OTHER_FILES = ("tarfile", "av", "Image")  # whose `open` reads no text


MAY_BE_TEXT = re.compile(r"\b(read_text|write_text|fdopen|\w*TemporaryFile|open|text|universal_newlines)\b")


def without_encoding(text: str) -> Iterator[int]:
    """Lines of calls that read or write text in the locale's encoding."""
    if not MAY_BE_TEXT.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and _is_text(node) and not _names_encoding(node):
            yield node.lineno


def _names_encoding(call: ast.Call) -> bool:
    """Or takes its keywords from a mapping, which may."""
    return bool({"encoding", None} & {word.arg for word in call.keywords})


def _is_text(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    words = {word.arg: word.value for word in call.keywords}
    if isinstance(text := words.get("text", words.get("universal_newlines")), ast.Constant):
        return text.value is True
    if name == "read_text":
        return not call.args
    if name == "write_text":
        return len(call.args) == 1
    if name in ("fdopen", "TemporaryFile", "NamedTemporaryFile", "open"):
        return _opens_text(call, name, words.get("mode"))
    return False


def _opens_text(call: ast.Call, name: str, mode: ast.expr | None) -> bool:
    is_method = isinstance(call.func, ast.Attribute)
    if name == "open" and isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in OTHER_FILES:
        return False
    takes_file = name == "fdopen" or (name == "open" and not is_method)
    given = mode or next(iter(call.args[1 if takes_file else 0 :]), None)
    if given is None:  # the record of a step has a method `open` too
        return takes_file or (name == "open" and not call.args and ast.unparse(call.func) != "record.open")
    letters = given.value if isinstance(given, ast.Constant) else ""
    return isinstance(letters, str) and bool(letters) and MODE_LETTERS.issuperset(letters) and "b" not in letters


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("path.read_text()", True),
        ("(folder / 'x').write_text(text)", True),
        ("path.open()", True),
        ("path.open('a')", True),
        ("open(path)", True),
        ("os.fdopen(handle, 'w')", True),
        ("tempfile.NamedTemporaryFile('w')", True),
        ("subprocess.run(command, text=True)", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text, encoding='utf-8')", False),
        ("path.open('rb')", False),
        ("open(path, mode='wb')", False),
        ("os.fdopen(handle, 'wb')", False),
        ("tempfile.NamedTemporaryFile()", False),
        ("tarfile.open(path, 'w')", False),
        ("subprocess.run(command, text=True, encoding='utf-8')", False),
        ("processor(text=text)", False),
    ],
)
def test_calls_are_found(line: str, is_found: bool) -> None:
    assert bool(list(without_encoding(line))) == is_found


def test_every_shipped_text_names_its_encoding() -> None:
    files = {str(path.relative_to(ROOT)): path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")}
    found = [
        f"{name}:{line}"
        for name, path in files.items()
        if not name.startswith(LINKS)
        for line in without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert len(files) > 500 and not found, 'add encoding="utf-8":\n' + "\n".join(sorted(found))
