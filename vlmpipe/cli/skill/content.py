"""The files of the skill folder, made from the command line, the exit codes, the run file's schema and a template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from vlmpipe.cli.init import FILES, PAGES, TEMPLATES
from vlmpipe.cli.skill.command_tree import Command
from vlmpipe.cli.skill.effects import Effect, Entry, load_effects
from vlmpipe.config.json_schema import markdown
from vlmpipe.config.sections.plan import PlanConfig
from vlmpipe.config.yaml_loader import packaged_yaml
from vlmpipe.trainer import __version__

NAME = "vlmpipe"
DESCRIPTION = (
    "Fine-tunes, evaluates, compares and registers vision-language models with the vlmpipe command line, on this "
    "machine, Vertex AI or Kubeflow: writes and checks run files, plans memory, hours and cost, runs or submits, and "
    "says why a run failed. Use it for training on images and text with vlmpipe, and for errors, job specs and costs "
    "of such runs."
)
MEANINGS = {
    Effect.reads: "change nothing; an option such as `--output` names a file that is written. No yes is needed",
    Effect.here: "compute or write on this machine and where `output.root_uri` points. No machine is rented; long runs "
    "take this machine",
    Effect.service: "change or stop what others may use, **without a question**: ask the person before",
    Effect.spends: "may start machines that are paid for. They plan and ask for approval; `--yes` is a person's answer",
    Effect.removes: "remove for good. They show what and ask; `--yes` is a person's answer. `--dry-run` only shows",
}
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
CODE_ROW = re.compile(r"^\| (\d+) \| `(\w+)` \| (.+?) \| (.*?) ?\|$", re.MULTILINE)
FIELD_ROW = re.compile(r"^\| `([\w.\[\]]+)` \|")


@dataclass(frozen=True)
class ExitCodeRow:
    """An exit code in the reference's table."""

    code: int
    name: str
    meaning: str
    remedy: str


def skill_files(commands: Sequence[Command]) -> dict[str, str]:
    """Each file's text, by its path in the skill's folder."""
    effects = load_effects()
    return {
        "SKILL.md": _skill(commands, effects),
        "references/commands.md": _commands(commands, effects),
        "references/exit-codes.md": LINK.sub(r"\1", _page("reference/exit-codes.md")),
        "references/run-file.md": _run_file(),
    }


def exit_code_rows() -> list[ExitCodeRow]:
    """The table of exit codes, as the reference has it, without its links."""
    rows = CODE_ROW.findall(LINK.sub(r"\1", _page("reference/exit-codes.md")))
    return [ExitCodeRow(int(code), name, meaning, remedy) for code, name, meaning, remedy in rows]


def _page(name: str) -> str:
    return (PAGES / name).read_text(encoding="utf-8")


def _skill(commands: Sequence[Command], effects: Mapping[str, Entry]) -> str:
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    template = (resources.files("vlmpipe.cli.skill") / "SKILL.md.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        name=NAME,
        description=json.dumps(DESCRIPTION),  # a colon in it would make YAML a mapping of it
        version=__version__,
        confirm_above_usd=f"{PlanConfig().confirm_above_usd:g}",
        effects=list(MEANINGS.items()),
        names=lambda effect: [command.name for command in commands if effects[command.name].effect == effect],
        exit_codes=exit_code_rows(),
        documents=[(command.name, effects[command.name].json) for command in commands if effects[command.name].json],
    )


def _commands(commands: Sequence[Command], effects: Mapping[str, Entry]) -> str:
    parts = ["# Commands of vlmpipe\n\nAs `--help` prints them. `vlmpipe --debug COMMAND` adds tracebacks to errors.\n"]
    for command in commands:
        lines = [f"## {command.name}", "", command.purpose, "", f"Effect: {effects[command.name].effect}.", ""]
        lines += ["```bash", *command.examples, "```", "", f"`{command.usage}`", ""]
        lines += [f"- `{typed}`: {text}" for typed, text in command.options]
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def _run_file() -> str:
    """The rows of the reference whose fields are required, or set by a template of `vlmpipe init`."""
    used = set(_fields_of_templates())
    lines, left_out = list[str](), 0
    for line in markdown().partition("\n## ")[2].splitlines():
        field = FIELD_ROW.match(line)
        if field and "." in field[1] and field[1] not in used and "**required**" not in line:
            left_out += 1
        else:
            lines.append(line)
    text = _without_empty_sections("## " + "\n".join(lines) + "\n")
    return (
        "# Run file: common fields\n\n"
        "Fields that are required, or that a template of `vlmpipe init` sets. "
        f"{left_out} further fields are not listed: `vlmpipe docs run-file` has them all, and `vlmpipe schema` prints "
        "their JSON Schema.\n"
        "`section.field=value` after the run file overrides a field for one command.\n\n" + text
    )


def _without_empty_sections(text: str) -> str:
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return "".join(section for section in sections if re.search(FIELD_ROW.pattern, section, re.MULTILINE))


def _fields_of_templates() -> Iterator[str]:
    for file, _ in FILES.values():
        yield from _paths(packaged_yaml((TEMPLATES / file).read_text(encoding="utf-8")), "")


def _paths(value: object, path: str) -> Iterator[str]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(inner, f"{path}[]")
