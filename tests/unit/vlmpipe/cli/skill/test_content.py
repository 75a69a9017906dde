"""The skill says what the program does: its commands parse, and its tables are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from tests.support.commands import command_lines, parse_vlmpipe
from tests.support.paths import ROOT
from vlmpipe.cli.app import app
from vlmpipe.cli.skill.command_tree import Command, commands_of
from vlmpipe.cli.skill.content import NAME, exit_code_rows, skill_files
from vlmpipe.config.json_schema import markdown
from vlmpipe.trainer.errors import ExitCode

LINK = re.compile(r"\]\(([^)]+)\)")
INLINE = re.compile(r"`vlmpipe ([a-z][a-z-]*)")
FIELD = re.compile(r"^\| `([\w.\[\]]+)` \|.*$", re.MULTILINE)


@pytest.fixture(scope="module")
def commands() -> list[Command]:
    return list(commands_of(typer.Context(typer.main.get_command(app), info_name="vlmpipe")))


@pytest.fixture(scope="module")
def files(commands: list[Command]) -> dict[str, str]:
    return skill_files(commands)


def test_the_front_matter_is_what_readers_of_skills_take(files: dict[str, str]) -> None:
    _, front, body = files["SKILL.md"].split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields.keys() == {"name", "description"} and fields["name"] == NAME
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", NAME) and len(NAME) <= 64
    assert 100 < len(fields["description"]) <= 1024
    assert len(body.splitlines()) < 500


def test_every_command_of_the_skill_parses(files: dict[str, str], commands: list[Command], tmp_path: Path) -> None:
    lines = []
    for name, text in files.items():
        page = tmp_path / name.replace("/", "-")
        page.write_text(text, encoding="utf-8")
        lines += command_lines(page)
    assert len(lines) > 2 * len(commands)
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "vlmpipe"
        parse_vlmpipe(arguments)


def test_the_loop_goes_from_data_to_a_judged_model(files: dict[str, str]) -> None:
    said = [line.split()[1] for line in files["SKILL.md"].splitlines() if line.startswith("vlmpipe ")]
    loop = ["init", "check", "plan", "run", "doctor", "submit", "status", "logs", "diagnose", "compare", "predict"]
    assert list(dict.fromkeys(said))[: len(loop)] == loop
    firsts = [command for command in said if command == "submit"]
    assert len(firsts) == 2 and files["SKILL.md"].index("--dry-run --json\n") < files["SKILL.md"].index("--detach")
    assert not any("--yes" in line for line in files["SKILL.md"].splitlines() if line.startswith("vlmpipe "))


def test_every_command_page_and_file_that_a_sentence_names_exists(files: dict[str, str]) -> None:
    known = set(typer.main.get_command(app).commands)
    pages = {path.stem for folder in (".", "how-to", "reference") for path in (ROOT / "docs" / folder).glob("*.md")}
    text = "\n".join(files.values())
    assert set(INLINE.findall(text)) <= known
    named = set(re.findall(r"vlmpipe docs ([a-z][a-z-]+)", text))
    assert "run-file" in named and named <= pages
    assert set(LINK.findall(files["SKILL.md"])) == files.keys() - {"SKILL.md"}
    assert [name for name in files if name != "SKILL.md" and LINK.search(files[name])] == []
    assert not re.search(r"docs/(?:how-to|reference)/", text.replace("--output docs/reference", ""))


def test_the_exit_codes_are_the_program_s(files: dict[str, str]) -> None:
    table = re.findall(r"^\| (\d+) \| ([A-Z_]+) \| (.+) \|$", files["SKILL.md"], re.MULTILINE)
    assert {(int(code), name) for code, name, _ in table} == {(code.value, code.name) for code in ExitCode}
    assert len(table) == len(ExitCode)
    assert [row.name for row in exit_code_rows() if not row.remedy] == ["OK"]


def test_each_command_is_described_with_all_its_options(files: dict[str, str], commands: list[Command]) -> None:
    page = files["references/commands.md"]
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == [command.name for command in commands]
    (submit,) = (command for command in commands if command.name == "submit")
    typed = " ".join(name for name, _ in submit.options)
    for option in ("--target", "--force", "--yes", "--dry-run", "--run-id", "--only", "--job-spec", "--json"):
        assert option in typed and option in page
    assert submit.usage == "vlmpipe submit [OPTIONS] [CONFIG] [a.b=c]..."


def test_the_run_file_s_excerpt_counts_what_it_leaves_out(files: dict[str, str]) -> None:
    page, whole = files["references/run-file.md"], markdown()
    listed, every = FIELD.findall(page), FIELD.findall(whole)
    left_out = re.search(r"(\d+) further fields are not listed", page)
    assert left_out and len(listed) + int(left_out[1]) == len(every)
    assert 50 < len(listed) < len(every) / 1.5
    required = {match[1] for match in FIELD.finditer(whole) if "**required**" in match[0]}
    assert required | {"train.epochs", "model.lora", "gate.min_exact_match"} & set(every) <= set(listed)
