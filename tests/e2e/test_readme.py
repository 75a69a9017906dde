"""README and docs: every command, file and link in them exists.

Tests of their own run the quickstart, the tutorial, and the pages on data and on Python.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import typer

from tests.support.commands import blocks, command_lines, parse_vlmpipe
from tests.support.paths import ROOT, files_of_repository
from vlmpipe.cli.app import app
from vlmpipe.config.run_config import load_run_file
from vlmpipe.config.validation_errors import RunFileError

PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    *files_of_repository("docs/*.md"),
]
COMMANDS = [(page, line) for page in PAGES for line in command_lines(page)]
MAKE_TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
MAKE_TARGETS |= {f"recipe-{path.parent.name}" for path in ROOT.glob("recipes/*/requirements.txt")}
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
OF_BUILDS = set(re.findall(r"\$\{([A-Z_]+):-", (ROOT / "container/build.sh").read_text()))
CLOUD_TOOLS = ("curl", "docker", "gcloud", "terraform", "kfp", "printf")  # their services are out of a test's reach
INLINE = re.compile(r"`(?:\.venv/bin/)?(vlmpipe|make) ([a-z][a-z-]*)[^`]*`")
FILE = re.compile(r"`((?:vlmpipe|trainer|components|pipelines|tests|benchmarks|docs|configs|container)/[\w./-]+)")
MODULE = re.compile(r"python -m ((?:vlmpipe|trainer|tests|benchmarks)\.[\w.]+)")


def _ids(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def test_the_readme_starts_with_the_two_commands() -> None:
    assert [line for page, line in COMMANDS if page.name == "README.md"][:2] == [
        "make quickstart",
        "make test",
    ]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=_ids)
def test_a_documented_command_exists(page: Path, line: str) -> None:
    own = re.sub(r"^([A-Z_]+=\S+ )+", "", line.replace("configs/mine.yaml", "configs/digits.yaml"))
    program, *arguments = shlex.split(own.removeprefix("sudo "), comments=True)
    if program == "make":
        _check_make(arguments)
    elif Path(program).name == "vlmpipe":
        _check_vlmpipe(arguments)
    elif program == "source":
        assert arguments in ([".venv/bin/activate"], ["env.sh"])
    elif Path(program).name == "python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1])
    elif Path(program).name == "python":
        assert arguments[0].startswith(("examples/", "container/")) and (ROOT / arguments[0]).is_file()
    elif program not in CLOUD_TOOLS:
        pytest.fail(f"{page.name} tells people to type a program that this test does not know: {line}")


def _check_make(arguments: list[str]) -> None:
    targets = [argument for argument in arguments if "=" not in argument]
    settings = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    assert set(targets) <= MAKE_TARGETS
    assert settings.keys() <= {"config", "args", "builder", "N", "SEED", "TESTBENCH"} | OF_BUILDS
    assert (ROOT / settings.get("config", "configs/digits.yaml")).is_file()
    subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)


def _check_vlmpipe(arguments: list[str]) -> None:
    rest = parse_vlmpipe(arguments)
    before = dict(zip(rest[1:], rest, strict=False))  # a job spec is the reader's own
    files = [argument for argument in rest if argument.endswith(".yaml") and before.get(argument) != "--job-spec"]
    overrides = [argument for argument in rest if "=" in argument and not argument.startswith("-")]
    for file in files:
        try:
            load_run_file(ROOT / file, overrides)
        except RunFileError as error:  # of a page that trains on from a run which an earlier command of it makes
            assert all("there is no such run" in problem.text for problem in error.problems), error.text()


def _of_pages(wrong: Callable[[Path], list[str]], pages: Sequence[Path] = PAGES) -> dict[str, list[str]]:
    """What is wrong, by page."""
    return {str(page.relative_to(ROOT)): result for page in pages if (result := wrong(page))}


def test_every_file_and_command_in_a_sentence_exists() -> None:
    commands = {"make": MAKE_TARGETS, "vlmpipe": set(typer.main.get_command(app).commands)}

    def unknown(page: Path) -> list[str]:
        text = page.read_text(encoding="utf-8")
        return [
            *(f"{program} {verb}" for program, verb in INLINE.findall(text) if verb not in commands[program]),
            *(file for file in FILE.findall(text) if not (ROOT / file).exists()),
            *(name for name in MODULE.findall(text) if not importlib.util.find_spec(name)),
        ]

    assert _of_pages(unknown) == {}


def test_no_command_hides_in_a_block_of_plain_text() -> None:
    def hidden(page: Path) -> list[str]:
        lines = [line for block in blocks(page, "text") for line in block.splitlines()]
        return [line for line in lines if re.match(r"(sudo |\.venv/bin/)?(vlmpipe|make|python) ", line)]

    assert _of_pages(hidden) == {}


def test_every_link_to_a_file_leads_somewhere() -> None:
    def broken(page: Path) -> list[str]:
        return [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]

    assert _of_pages(broken) == {}


def test_lines_outside_of_tables_are_short() -> None:
    def long(page: Path) -> list[str]:
        lines = page.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if len(line) > 160 and not line.startswith("|")]

    assert _of_pages(long, [*PAGES, ROOT / "SECURITY.md"]) == {}


def test_every_run_file_is_listed() -> None:
    page = ROOT / "docs/reference/shipped-run-files.md"
    listed = set(re.findall(r"\(\.\./\.\./configs/([\w-]+\.yaml)\)", page.read_text(encoding="utf-8")))
    assert listed == {path.name for path in (ROOT / "configs").glob("*.yaml")}


def test_every_command_is_listed() -> None:
    page = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([a-z]+)", page, re.M))
    assert listed == set(typer.main.get_command(app).commands)


def test_the_readme_takes_a_screen_and_a_half() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90
