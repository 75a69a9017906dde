"""Reads a user's YAML files: run files, with `a.b=c` overrides, and what they name. Safe YAML 1.2."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vlmpipe.config.validation_errors import Problem, RunFileError, did_you_mean
from vlmpipe.trainer.errors import ConfigError, os_errors
from vlmpipe.trainer.storage.records import KEY, damaged_record, unseal
from vlmpipe.trainer.storage.regular_files import FileTooLargeError, NotRegularFileError, kind_of, read_regular

LARGEST_FILE_BYTES = 1 << 20
CONFIGS_FOLDER = Path("configs")

if TYPE_CHECKING or not yaml.__with_libyaml__:
    _Base = yaml.SafeLoader
else:

    class _Base(yaml.composer.Composer, yaml.CSafeLoader):
        """libyaml parses the text, Python composes the nodes: libyaml's composer crashes on a deeply nested file."""

        def __init__(self, stream: str) -> None:
            yaml.CSafeLoader.__init__(self, stream)
            yaml.composer.Composer.__init__(self)


SCALARS = ("str", "int", "float", "bool", "null")
KINDS = dict.fromkeys(SCALARS, yaml.ScalarNode) | {"seq": yaml.SequenceNode, "map": yaml.MappingNode}  # by tag


class _Loader(_Base):
    """YAML's safe subset with three differences.

    A duplicate key is an error. `on`, `off`, `yes` and `1:30` stay text and `1e-4` is a number, as in YAML 1.2. Aliases
    are refused: a kilobyte of them can expand to a gigabyte.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML adds to the own dict of each class)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed in a run file", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        name = node.tag.removeprefix("tag:yaml.org,2002:")
        if not isinstance(node, KINDS.get(name, ())):
            problem = f"a value that cannot be read as {name}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError) as error:  # !!int abc, or more digits than Python reads
            problem = f"a value that cannot be read as {name}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=key_node.start_mark)
            if key_node.value in seen:
                problem = f"the key {key_node.value} is given twice in one section"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"^(true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(0|[1-9][0-9]*)$", "-+0123456789"),
    ("float", r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$", "-+0123456789."),
    ("null", r"^(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text. Raises RunFileError that names line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RunFileError(source, [Problem(where, f"not valid YAML: {error.problem or error.context}")]) from error
    except yaml.YAMLError as error:
        raise RunFileError(source, [Problem("", f"not valid YAML: {error}")]) from error
    except UnicodeEncodeError as error:
        raise RunFileError(source, [Problem("", "holds half a character, which is no text")]) from error
    except RecursionError as error:
        raise RunFileError(source, [Problem("", "nested too deep to be a run file")]) from error


def compose(text: str) -> yaml.Node | None:
    """The nodes of a YAML text, with their positions. For a text that `parse_yaml` accepts."""
    return yaml.compose(text, Loader=_Loader)


def read_text(path: Path, kind: str) -> str:
    """A text file of the user. `kind` says in errors what it should be, such as "a run file".

    Raises ConfigError for a file that is too large, not regular or not UTF-8.
    """
    with os_errors(f"reading {path}"):
        try:
            return read_regular(path, LARGEST_FILE_BYTES).decode("utf-8-sig")
        except FileTooLargeError as error:
            raise ConfigError(error.found, expected=f"{kind} of at most {LARGEST_FILE_BYTES:,} bytes") from error
        except NotRegularFileError as error:
            raise ConfigError(error.found, expected=kind) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not text (byte {error.start} is not UTF-8)", expected=kind) from error


def read_mapping(path: Path, text: str, expected: str) -> dict[str, Any]:
    """The mapping that a YAML file holds. Raises ConfigError for any other content."""
    data = parse_yaml(text, str(path))
    if isinstance(data, dict):
        return data
    raise ConfigError(f"{path} is {'empty' if data is None else f'a {type(data).__name__}'}", expected=expected)


def read_run_file(path: Path) -> dict[str, Any]:
    """The mapping in a run file. Raises ConfigError for a missing, too large or unreadable file."""
    if not path.is_file():
        raise _missing(path)
    text = read_text(path, "a run file")
    data = read_mapping(path, text, "a run file with sections such as model, data and train")
    if KEY in data:  # the copy in a run's folder
        try:
            return unseal(text.encode())
        except ValueError as error:
            raise damaged_record(str(path), error) from error
    return data


def _missing(path: Path) -> ConfigError:
    """The error for a path that is no run file: names the run files in its folder or in configs/, the closest first."""
    folder = path if path.is_dir() else CONFIGS_FOLDER
    kind = "a folder" if path.is_dir() else kind_of(path)
    others = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    others.sort(key=lambda other: -difflib.SequenceMatcher(None, other.stem, path.stem).ratio())
    return ConfigError(
        f"{path} is {kind}, not a run file" if kind else f"no run file {path}",
        expected="the path of a YAML run file",
        fix=f"in {folder}/: {', '.join(map(str, others))}"
        if others
        else "give the path of one; docs/reference/run-file.md lists its fields",
    )


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """`["train.epochs=2", ...]` as {dotted key: value}. Values are read as YAML; `a.b=` sets an empty text."""
    overrides: dict[str, Any] = {}
    problems = []
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        # Bytes that are not UTF-8 reach Python as surrogates, which encode to nothing.
        if "\0" in text or text.encode(errors="ignore").decode() != text:
            problems.append(Problem("", f"found {text!r}, expected text in UTF-8 without NUL"))
        elif not equals or not all(key.split(".")):
            problems.append(Problem("", f"found {text!r}, expected an override of the form section.field=value"))
        elif key in overrides:
            problems.append(Problem(key, "overridden twice"))
        else:
            overrides[key] = parse_yaml(value, f"override {key}") if value.strip() else ""
    if problems:
        raise RunFileError("command line", problems)
    return overrides


def apply_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the run file `data` with dotted keys replaced. Keys are not checked here: the schema does that.

    In a list of sections a key has the section's name: stages.align.train.epochs. Raises RunFileError when a key leads
    through a plain value, or to a section that the list has not.
    """
    result = copy.deepcopy(dict(data))
    problems = []
    for key, value in overrides.items():
        *sections, last = key.split(".")
        place: Any = result
        for section in sections:
            inner = _section(place, section)
            if isinstance(inner, str):
                problems.append(Problem(key, inner))
                break
            place = inner
        else:
            if isinstance(place, dict):
                place[last] = value
            else:
                problems.append(Problem(key, f"{sections[-1]} is a list, and {last} is no section of it"))
    if problems:
        raise RunFileError("overrides", problems)
    return result


def _section(place: dict[str, Any] | list[Any], name: str) -> dict[str, Any] | list[Any] | str:
    """The section of that name, also in a list of named ones; else what is wrong."""
    if isinstance(place, list):
        named = {str(one["name"]): one for one in place if isinstance(one, dict) and "name" in one}
        return named.get(name) or f"there is no {name} in the list{did_you_mean(name, list(named))}"
    if place.get(name) is None:
        place[name] = {}
    inner = place[name]
    return inner if isinstance(inner, dict | list) else f"{name} is a single value and has no fields of its own"
