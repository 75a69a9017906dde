"""What README and docs tell people to type exists: targets, subcommands, flags, files and links.

The quickstart and the tutorial are carried out by tests of their own.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import command_lines, parse_vlmpipe
from tests.support.paths import ROOT
from vlmpipe.config.run_config import load_run_file

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = [(page, line) for page in PAGES for line in command_lines(page)]
MAKE_TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def _ids(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def test_the_readme_starts_with_the_two_commands() -> None:
    assert [line for page, line in COMMANDS if page.name == "README.md"][:2] == [
        "make quickstart",
        "make test",
    ]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=_ids)
def test_a_documented_command_exists(page: Path, line: str) -> None:
    program, *arguments = shlex.split(line.removeprefix("sudo "))
    if program == "make":
        _check_make(arguments)
    elif Path(program).name == "vlmpipe":
        _check_vlmpipe(arguments)
    elif program == "source":
        assert arguments == [".venv/bin/activate"]
    else:
        pytest.fail(f"{page.name} tells people to type a program that this test does not know: {line}")


def _check_make(arguments: list[str]) -> None:
    targets = [argument for argument in arguments if "=" not in argument]
    settings = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    assert set(targets) <= MAKE_TARGETS
    assert settings.keys() <= {"config", "args", "builder"}
    assert (ROOT / settings.get("config", "configs/digits.yaml")).is_file()
    subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)


def _check_vlmpipe(arguments: list[str]) -> None:
    rest = parse_vlmpipe(arguments)
    files = [argument for argument in rest if argument.endswith(".yaml")]
    overrides = [argument for argument in rest if "=" in argument and not argument.startswith("-")]
    for file in files:
        load_run_file(ROOT / file, overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert broken == []


def test_the_readme_lists_every_run_file() -> None:
    listed = set(re.findall(r"\(configs/([\w-]+\.yaml)\)", (ROOT / "README.md").read_text()))
    assert listed == {path.name for path in (ROOT / "configs").glob("*.yaml")}
