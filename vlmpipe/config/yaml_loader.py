"""Reads a user's YAML files: run files and what they name. Safe YAML 1.2."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vlmpipe.config.file_kinds import RUN_FILE, is_html, kind_of_content
from vlmpipe.config.validation_errors import Problem, RunFileError
from vlmpipe.trainer.errors import ConfigError, os_errors
from vlmpipe.trainer.nesting import is_nested_too_deep
from vlmpipe.trainer.storage.records import KEY, damaged_record, unseal
from vlmpipe.trainer.storage.regular_files import FileTooLargeError, NotRegularFileError, kind_of, read_regular

LARGEST_FILE_BYTES = 1 << 20
CONFIGS_FOLDER = Path("configs")
RUN_FILES = Path(__file__).parents[1] / "run_files"  # configs/, in the wheel too

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


class RunFileLoader(_Base):
    """YAML's safe subset with three differences.

    A duplicate key is an error. `on`, `off`, `yes` and `1:30` stay text and `1e-4` is a number, as in YAML 1.2. Aliases
    are refused: a kilobyte of them can expand to a gigabyte.
    """

    takes_aliases = False
    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML adds to the own dict of each class)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent) and not self.takes_aliases:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed in a run file", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        name = node.tag.removeprefix("tag:yaml.org,2002:")
        if not isinstance(node, KINDS.get(name, ())):
            problem = f"a value that cannot be read as {name}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError) as error:  # !!int abc, or more digits than Python reads
            problem = f"a value that cannot be read as {name}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
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
    RunFileLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def packaged_yaml(text: str) -> Any:
    """The value of a YAML file of this package, by libyaml where PyYAML has it: in a tenth of the time."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text. Raises RunFileError that names line and column."""
    try:
        value = yaml.load(text, Loader=RunFileLoader)
        if is_nested_too_deep(value):  # RunFileLoader takes no aliases, so each value is walked once
            raise RecursionError
        return value
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
    return yaml.compose(text, Loader=RunFileLoader)


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


def read_mapping(path: Path, text: str, expected: str) -> dict[str, object]:
    """The mapping that a YAML file holds. Raises ConfigError for any other content."""
    data = parse_yaml(text, str(path))
    if isinstance(data, dict):
        return data
    raise ConfigError(f"{path} is {'empty' if data is None else f'a {type(data).__name__}'}", expected=expected)


def shipped(path: Path) -> Path | None:
    """The package's own copy of configs/NAME.yaml, where no such file is here; None for all other paths."""
    copy = RUN_FILES / path.name
    is_named = len(path.parts) == 2 and path.parts[0] == str(CONFIGS_FOLDER) and copy.is_file()
    return copy if is_named and not path.exists() else None


def read_run_file(path: Path) -> dict[str, object]:
    """The mapping in a run file. Raises ConfigError for a missing, too large or unreadable file."""
    with os_errors(f"reading {path.name[:80]}"):  # such as a name that is too long
        path = shipped(path) or path
        is_there = path.is_file()
    if not is_there:
        raise _missing(path)
    text = read_text(path, "a run file")
    expected = "a run file with sections such as model, data and train"
    if is_html(text):
        raise ConfigError(f"{path} is a page for a browser", expected=expected, fix="open it there; give the run file")
    data = read_mapping(path, text, expected)
    kind = kind_of_content(data)
    if kind and kind is not RUN_FILE and not RUN_FILE.keys & data.keys():
        raise ConfigError(f"{path} is {kind.name}", expected=expected, fix=kind.fix_for(path))
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
        else "give the path of one; vlmpipe docs run-file lists its fields",
    )
