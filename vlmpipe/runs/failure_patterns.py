"""Known failures (failure_patterns.yaml), matched against log text."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from vlmpipe.config.yaml_loader import packaged_yaml

TABLE = "failure_patterns.yaml"
_FIELDS = re.compile(r"{(\w+)}")


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Pattern:
    """One kind of failure. A consequence or warning counts only when no cause is found."""

    id: str
    any: tuple[str, ...]
    cause: str
    remedy: str
    detail: str = ""
    exit_codes: tuple[int, ...] = ()
    ends_as: int = 0
    kind: Literal["cause", "consequence", "warning"] = "cause"
    source: str = Field(default="")
    remedies: Mapping[str, str] = Field(default_factory=dict)

    def find(self, text: str) -> re.Match[str] | None:
        """The first match in `text`."""
        matches = [match for form in self.any if (match := _compiled(form).search(text))]
        return min(matches, key=lambda match: match.start(), default=None)

    def remedy_in(self, step: str) -> str:
        """Remedy where the step of this title failed: its name, after its stage's."""
        for_step = (text for name, text in self.remedies.items() if step == name or step.endswith(f"-{name}"))
        return next(for_step, self.remedy)

    def detail_of(self, match: re.Match[str]) -> str:
        """`detail` with the match's groups; "" if one of them is missing."""
        named = {name: value.strip() for name, value in match.groupdict().items() if value}
        return self.detail.format(**named) if set(_FIELDS.findall(self.detail)) <= set(named) else ""


@dataclass(frozen=True)
class Hit:
    """A pattern that a text matches. `line` counts from 1; 0 where lines have no numbers."""

    pattern: Pattern
    where: str
    line: int
    text: str
    detail: str

    @property
    def place(self) -> str:
        """Place where the failure was seen, for people."""
        return f"{self.where}:{self.line}" if self.line else self.where


@functools.cache
def patterns() -> tuple[Pattern, ...]:
    """The table, the most specific first."""
    content = packaged_yaml(resources.files("vlmpipe.runs").joinpath(TABLE).read_text("utf-8"))
    return tuple(TypeAdapter(list[Pattern]).validate_python(content))


def hits(where: str, text: str, *, first_line: int = 1) -> list[Hit]:
    """Patterns that `text` matches, in the table's order. It begins at line `first_line` of `where`."""
    result = []
    for pattern in patterns():
        if match := pattern.find(text):
            start = text.rfind("\n", 0, match.start()) + 1
            line = text[start:].split("\n", 1)[0].strip()
            number = first_line + text.count("\n", 0, match.start())
            result.append(Hit(pattern, where, number, line, pattern.detail_of(match)))
    return result


@functools.cache
def _compiled(form: str) -> re.Pattern[str]:
    return re.compile(form, re.MULTILINE)
