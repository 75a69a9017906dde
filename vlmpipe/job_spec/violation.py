"""Violations of the job spec rules. The rules' titles, severities and sources are in `rules/rules.yaml`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from vlmpipe.config.yaml_loader import packaged_yaml
from vlmpipe.trainer.nesting import object_at
from vlmpipe.trainer.redaction import redact

FieldPath = tuple[str | int, ...]  # ("worker_pool_specs", 0, "replica_count")
Severity = Literal["error", "warning"]
RULES_FOLDER = Path(__file__).with_name("rules")


def read_rules_yaml(name: str) -> dict[str, object]:
    content: dict[str, object] = packaged_yaml((RULES_FOLDER / name).read_text(encoding="utf-8"))
    return content


@dataclass(frozen=True)
class Rule:
    """A rule about job specs. `source` is the platform's document, or a measurement."""

    code: str
    title: str
    severity: Severity
    source: str


def _load_rules() -> dict[str, Rule]:
    content = read_rules_yaml("rules.yaml")
    sources, rules = object_at(content, "sources"), object_at(content, "rules")
    entries = {code: {"code": code, **object_at(rules, code)} for code in rules}
    for entry in entries.values():
        entry["source"] = str(sources[str(entry["source"])]).strip()
    return TypeAdapter(dict[str, Rule]).validate_python(entries)


RULES: Mapping[str, Rule] = _load_rules()


@dataclass(frozen=True)
class Violation:
    """A broken rule. Rules give `field`, the path in the API's names; `named` replaces it by `path`, for the user."""

    code: str
    field: FieldPath
    found: str
    expected: str
    fix: str = ""
    path: str = ""

    @property
    def severity(self) -> Severity:
        return RULES[self.code].severity

    @property
    def source(self) -> str:
        return RULES[self.code].source

    @property
    def sentence(self) -> str:
        """The violation in words, without its code and its path."""
        fix = f"; {self.fix}" if self.fix else ""
        return f"found {self.found}, expected {self.expected}{fix}"

    def named(self, name_path: Callable[[FieldPath], str]) -> Violation:
        """The violation for the user: with the field's name as `path`, and secrets redacted."""
        return replace(
            self,
            field=(),
            path=redact(name_path(self.field)),
            found=redact(self.found),
            expected=redact(self.expected),
            fix=redact(self.fix),
        )

    def text(self) -> str:
        """One line, in which characters that would end it or control a terminal are escaped."""
        text = f"{self.code} {self.path}: {self.sentence}"
        return "".join(
            character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
        )

    def as_dict(self) -> dict[str, str]:
        names = ("code", "severity", "path", "found", "expected", "fix", "source")
        return {name: getattr(self, name) for name in names}


def path_text(path: FieldPath, root: str = "job_spec") -> str:
    """`job_spec.worker_pool_specs[0].replica_count`."""
    text = root
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
