"""A run file in the making: its fields with the reasons for their values, and the findings about the imported file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.config.validation_errors import Problem, RunFileError, fields_of
from vlmpipe.importing.findings import Ledger, Outcome, Path
from vlmpipe.importing.named_files import NamedFiles
from vlmpipe.importing.yaml_text import comment_lines, yaml_lines
from vlmpipe.trainer.printable import unsafe_characters

SECTIONS = ("version", "name", "model", "data", "features", "train", "checkpoint", "evaluate", "gate", "register",
            "output", "cluster", "secrets", "tune", "plan", "gcp")  # fmt: skip
# Fields that are decided first: others give way where two do not go together.
DECISIVE = ("train.strategy", "train.trainer.launch", "train.objective", "train.precision", "model.family")
MAX_CONFLICTS = 60
EXAMPLE_SOURCE = "gs://example-bucket/conversations/train.json"
# Examples where a field that is needed has a value that a run file does not take.
FALLBACKS: Mapping[str, object] = {
    "name": "imported",
    "data.source": EXAMPLE_SOURCE,
    "data.sequence_length": 4096,
    "train.optimizer.learning_rate": 1e-5,
    "cluster.replica_count": 1,
}
# Fields that a run file cannot be without.
REQUIRED = ("name", "model.tokenizer", "model.pretrained.weights", "data.sequence_length",
            "train.global_batch_size", "train.optimizer.learning_rate", "train.trainer.name",
            "train.trainer.command", "cluster.replica_count")  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A field's value. `reason` is its comment; `is_given` is false for values that the imported file does not say."""

    value: Any
    reason: str
    is_given: bool


class Translation:
    """Fields of a run file by dotted name, and what became of each value of the imported file."""

    def __init__(self, content: object, files: NamedFiles | None = None) -> None:
        """files: those that the content may name; none by default."""
        self.ledger = Ledger(content)
        self.files = files or NamedFiles()
        self.settings: dict[str, Setting] = {}

    def value(self, path: Path) -> object:
        """A value of the imported file; None where it has none."""
        return self.ledger.values.get(path)

    def express(self, path: Path, field: str, value: object = None) -> None:
        """Take a value over as it is."""
        self.settings[field] = Setting(self.value(path) if value is None else value, "", is_given=True)
        self.ledger.note(path, Outcome.EXPRESSED, field)

    def change(self, paths: Iterable[Path], field: str, value: object, reason: str) -> None:
        """Take one or more values over in another form."""
        self.settings[field] = Setting(value, reason, is_given=True)
        for path in paths:
            self.ledger.note(path, Outcome.CHANGED, field, reason)

    def assume(self, field: str, value: object, reason: str) -> None:
        """Set a field that the imported file says nothing about, unless it is set."""
        self.settings.setdefault(field, Setting(value, reason, is_given=False))

    def drop(self, path: Path, reason: str) -> None:
        self.ledger.note(path, Outcome.DROPPED, "", reason)

    def refuse(self, path: Path, reason: str) -> None:
        self.ledger.note(path, Outcome.REFUSED, "", reason)

    def content(self) -> dict[str, object]:
        """The run file's sections, in their usual order."""
        sections = {_section(key) for key in self.settings}
        content: dict[str, object] = {name: {} for name in SECTIONS if name in sections}
        for field, setting in sorted(self.settings.items(), key=lambda item: _place(item[0])):
            *parents, last = field.split(".")
            place = content
            for parent in parents:
                place = _inside(place, parent)
            place[last] = setting.value
        return content

    def settle(self, source: str, mend_batch: Callable[[Translation], None]) -> None:
        """Refuse values that a run file does not take, each with the words of `check`.

        mend_batch: gives the global batch a size that the ranks divide, after a degree of parallelism was refused.
        Raises RunFileError where what is left cannot be a run file.
        """
        # Each by itself: sections of passed-on values have one problem, however many of their values are unsafe.
        for field in [field for field in self.settings if field not in (*REQUIRED, *FALLBACKS)]:
            if self._is_unsafe(field):
                self._refuse(field, self.settings.pop(field).value, "has characters that a run file does not take")
        for _ in range(MAX_CONFLICTS):
            problems = self._problems(source)
            if not problems:
                return
            if any(problem.field == "train.global_batch_size" for problem in problems):
                before = self.settings["train.global_batch_size"]
                mend_batch(self)
                if self.settings["train.global_batch_size"] != before:
                    continue
            if not self._resolve(problems, source):
                raise RunFileError(source, problems)
        raise RunFileError(source, self._problems(source))

    def _problems(self, source: str) -> tuple[Problem, ...]:
        try:
            parse_run_config(self.content(), source)
        except RunFileError as error:
            return error.problems
        return ()

    def _resolve(self, problems: tuple[Problem, ...], source: str) -> bool:
        """Take out the fields of the first problem that can be solved so. Returns whether there is one."""
        for problem in problems:
            if problem.field in FALLBACKS and self.settings[problem.field].is_given:
                self.ledger.refuse_field(problem.field, f"{problem.field}: {problem.text}")
                self.settings[problem.field] = Setting(
                    FALLBACKS[problem.field], "an example: see below", is_given=False
                )
                return True
            for fields in self._suspects(problem):
                before = dict(self.settings)
                for field in fields:
                    del self.settings[field]
                left = self._problems(source)
                # Without a field that is needed, that field is the problem.
                if problem not in left and not any(other.field in fields for other in left):
                    for field in fields:
                        self._refuse(field, before[field].value, f"{problem.field}: {problem.text}")
                    return True
                self.settings = before
        return False

    def _refuse(self, field: str, value: object, reason: str) -> None:
        """A field does not stay: its values are refused, or the field itself where no value of the file is its own."""
        if not self.ledger.refuse_field(field, reason):
            self.ledger.add((field,), value)
            self.ledger.note((field,), Outcome.REFUSED, "", reason)

    def _suspects(self, problem: Problem) -> list[list[str]]:
        """Fields that a problem is about: the one it names, those that it mentions, and sections that it mentions."""
        optional = [field for field in self.settings if field not in REQUIRED]
        exact = [field for field in optional if problem.field and _covers(field, problem.field)]
        mentioned = [field for field in optional if field.rpartition(".")[2] in problem.text or self._is_unsafe(field)]
        mentioned.sort(key=lambda field: (field in DECISIVE, not field.startswith(problem.field)))
        sections = {
            ".".join(field.split(".")[: number + 1])
            for field in optional
            for number, part in enumerate(field.split("."))
            if number and (part in problem.text or problem.field == ".".join(field.split(".")[: number + 1]))
        }
        groups = [[field for field in optional if field.startswith(f"{name}.")] for name in sorted(sections)]
        single = dict.fromkeys([*exact, *mentioned])
        others, decisive = ([[field] for field in single if (field in DECISIVE) is last] for last in (False, True))
        return [*others, *filter(None, groups), *decisive]

    def _is_unsafe(self, field: str) -> bool:
        value = self.settings[field].value
        texts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
        return any(isinstance(text, str) and unsafe_characters(text) for text in texts)

    def text(self, heading: Iterable[str], footing: Iterable[str]) -> str:
        """The run file with a comment for each field whose value is not simply taken over."""
        comments: dict[Path, str] = {
            tuple(field.split(".")): setting.reason for field, setting in self.settings.items() if setting.reason
        }
        lines = [line for paragraph in heading for line in comment_lines(paragraph, hanging="  ")]
        lines += yaml_lines(self.content(), comments)
        closing = list(footing)
        if closing:
            lines += ["", *(line for paragraph in closing for line in comment_lines(paragraph, hanging="  "))]
        return "\n".join([*lines, ""])


@functools.cache
def _places() -> Mapping[str, int]:
    return {path: number for number, (path, _, _) in enumerate(fields_of(RunConfig))}


def _place(field: str) -> int:
    """Position of a field in the schema; keys of a field that is a mapping stand where it does."""
    while field and field not in _places():
        field = field.rpartition(".")[0]
    return _places().get(field, 0)


def _inside(section: dict[str, object], name: str) -> dict[str, object]:
    """The section `name` of a section, which is made where there is none."""
    inner = section.setdefault(name, {})
    assert isinstance(inner, dict), f"{name} has a value and fields"
    return inner


def _section(field: str) -> str:
    return field.partition(".")[0]


def _covers(field: str, problem_field: str) -> bool:
    return field == problem_field or problem_field.startswith((f"{field}.", f"{field}["))
