"""Nothing writes to the terminal past the streams that hide secrets and control characters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGES = ("vlmpipe", "trainer", "pipelines", "components")
CONSOLE = "vlmpipe/runs/terminal.py"  # may make rich's
STREAMS = "trainer/redaction.py"  # may hold the streams themselves
BYPASSES = {
    "sys.__stdout__": "the stream before it was replaced",
    "sys.__stderr__": "the stream before it was replaced",
    "sys.stdout.buffer": "bytes are not looked at",
    "sys.stderr.buffer": "bytes are not looked at",
    "typer.secho": "colours are removed",
    "click.secho": "colours are removed",
    "rich.print": "a console of its own",
    "rich.get_console": "a console of its own",
}


ENDS = {name.rpartition(".")[2] for name in BYPASSES} | {"Console", "write", "write_styled"}
MAY_BYPASS = re.compile(
    rf"\b({'|'.join(sorted(ENDS - {'write'}))}|os\.write)\b"
)  # the tree of another module is not looked at


def bypasses(source: str) -> Iterator[str]:
    """What in a module prints past the streams."""
    if not MAY_BYPASS.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) and node.attr in ENDS else ""
        if text in BYPASSES:
            yield f"line {node.lineno}: {text}: {BYPASSES[text]}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            last = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            called = ast.unparse(node.func) if last in ENDS else ""
            if last == "Console":
                yield f"line {node.lineno}: {called}: a console that prints texts as they are"
            if called == "os.write" and node.args and ast.unparse(node.args[0]) in ("1", "2"):
                yield f"line {node.lineno}: {called}: bytes are not looked at"
            if last == "write_styled":
                yield f"line {node.lineno}: {called}: texts with control sequences"


def modules() -> list[Path]:
    found = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    return [path for path in found if not any(parent.is_symlink() for parent in path.parents)]


@pytest.mark.parametrize(
    "source",
    ["sys.__stderr__.write(x)", "sys.stdout.buffer.write(x)", "os.write(2, x)", "Console().print(x)",
     "rich.console.Console(file=f)", "typer.secho(x)", "rich.print(x)", "stream.write_styled(x)"],
)  # fmt: skip
def test_a_way_around_is_found(source: str) -> None:
    assert list(bypasses(source))


def test_no_module_prints_past_the_streams() -> None:
    found = {
        str(path.relative_to(ROOT)): problems
        for path in modules()
        if str(path.relative_to(ROOT)) not in (CONSOLE, STREAMS)
        and (problems := list(bypasses(path.read_text("utf-8"))))
    }
    assert not found
    assert len(modules()) > 500
