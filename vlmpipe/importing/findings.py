"""Outcomes of the values of an imported file, each with a reason. `Ledger.unanswered` lists values without one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from vlmpipe.config.validation_errors import show
from vlmpipe.job_spec.rules.environment import secret_in_word
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.printable import one_line
from vlmpipe.trainer.redaction import HIDDEN, redact
from vlmpipe.trainer.secret_detection import form_of_secret, is_secret_name, may_be_secret

Path = tuple[str | int, ...]  # ("worker_pool_specs", 0, "replica_count")
MAX_VALUES, MAX_DEPTH = 5_000, 40  # the largest listing of a guide has some 100 values


class Outcome(StrEnum):
    """Outcome of a value."""

    EXPRESSED = "expressed"  # with the same meaning and value
    CHANGED = "changed"  # by another value, form or default
    DROPPED = "dropped"  # needless or without effect here
    REFUSED = "refused"  # cannot be expressed, or is unknown


@dataclass(frozen=True)
class Finding:
    """A value's outcome.

    `path` is as in the file, `value` as shown to people. `field` is where the value went: a field of the run file or a
    path of the job spec; empty for none.
    """

    path: str
    value: str
    outcome: Outcome
    field: str = ""
    reason: str = ""

    def as_dict(self) -> dict[str, str]:
        names = ("path", "value", "outcome", "field", "reason")
        return {name: str(getattr(self, name)) for name in names}


def leaves(content: object) -> dict[Path, object]:
    """Every value of nested mappings and lists, by its path. A list of plain values is one value.

    Raises ConfigError for more than MAX_VALUES values or a nesting deeper than MAX_DEPTH.
    """
    values: dict[Path, object] = {}
    for path, value in _leaves(content, ()):
        values[path] = value
        if len(values) > MAX_VALUES:
            raise ConfigError(f"the file has more than {MAX_VALUES:,} values", expected="one configuration or job spec")
    return values


def _leaves(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    if len(path) > MAX_DEPTH:
        raise ConfigError("the file is nested too deeply", expected="one configuration or job spec")
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def path_text(path: Path) -> str:
    """`worker_pool_specs[0].replica_count`, printable and in one line."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return one_line(redact(text)) or "(the whole file)"


def is_secret(path: Path, value: object, name: str = "") -> bool:
    """Return whether the value is a secret, by its own form, the name of its key, or `name`."""
    names = [name, *(part for part in path[-1:] if isinstance(part, str))]
    if isinstance(value, list):
        words = [str(word) for word in value]
        return any(secret_in_word(word, previous) for previous, word in zip(["", *words], words, strict=False))
    if not isinstance(value, str):
        return False
    named = any(is_secret_name(candidate) and may_be_secret(candidate, value) for candidate in names)
    return named or bool(form_of_secret(value)) or bool(secret_in_word(value, ""))


def shown(path: Path, value: object, name: str = "") -> str:
    """A value for people: short, in one line, without secrets. `name` is that of the variable that holds it."""
    return HIDDEN if is_secret(path, value, name) else one_line(show(value))


class Ledger:
    """The findings of one import, at most one for each value of the file."""

    def __init__(self, content: object) -> None:
        self.values = leaves(content)
        self._findings: dict[Path, Finding] = {}

    def note(self, path: Path, outcome: Outcome, field: str = "", reason: str = "") -> None:
        """Answer a value, or every value below `path`. A later answer replaces an earlier one."""
        for leaf in self.below(path):
            text = shown(leaf, self.values[leaf], self._variable(leaf))
            self._findings[leaf] = Finding(path_text(leaf), text, outcome, field, one_line(redact(reason)))

    def add(self, path: Path, value: object) -> None:
        """A value that is not part of the content, such as an expression of a listing."""
        self.values.setdefault(path, value)

    def replace(self, leaf: Path, content: object) -> None:
        """Answer the parts of a value one by one, such as the options of a command."""
        del self.values[leaf]
        self._findings.pop(leaf, None)
        self.values |= {(*leaf, *path): value for path, value in leaves(content).items()}

    def _variable(self, leaf: Path) -> str:
        """Name of the environment variable whose value this is; empty for other values."""
        beside = (*leaf[:-1], "name")
        return str(self.values.get(beside, "")) if leaf[-1:] == ("value",) else ""

    def below(self, path: Path) -> list[Path]:
        """The values at `path` or below it."""
        return [leaf for leaf in self.values if leaf[: len(path)] == path]

    def finding(self, leaf: Path) -> Finding:
        return self._findings[leaf]

    def unanswered(self) -> list[Path]:
        return [leaf for leaf in self.values if leaf not in self._findings]

    def leaves_of(self, field: str) -> list[Path]:
        """The values that became a run-file field."""
        taken = (Outcome.EXPRESSED, Outcome.CHANGED)
        return [leaf for leaf, finding in self._findings.items() if finding.field == field and finding.outcome in taken]

    def refuse_field(self, field: str, reason: str, outcome: Outcome = Outcome.REFUSED) -> bool:
        """A run-file field that was set cannot stay: its values are refused. Returns whether it has values.

        outcome: DROPPED for values without effect.
        """
        leaves = self.leaves_of(field)
        for leaf in leaves:
            self._findings[leaf] = replace(
                self._findings[leaf], outcome=outcome, field="", reason=one_line(redact(reason))
            )
        return bool(leaves)

    def findings(self) -> list[Finding]:
        """In the file's order."""
        return [self._findings[leaf] for leaf in self.values if leaf in self._findings]
