"""Job specs in files: YAML or JSON, complete or partial, in snake_case or camelCase."""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml

from vlmpipe.catalog.machines import Catalog
from vlmpipe.config.file_kinds import JOB_SPEC, kind_of_content
from vlmpipe.config.yaml_loader import read_text
from vlmpipe.job_spec.read_forms import ReadSpec
from vlmpipe.job_spec.rules import check_spec
from vlmpipe.job_spec.schema import Spelling, camel_case, load_fields, read_message, snake_case
from vlmpipe.job_spec.study import CHECKED, study_violations
from vlmpipe.job_spec.violation import FieldPath, Violation, path_text
from vlmpipe.job_spec.worker_pools import POOLS
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.nesting import is_nested_too_deep

if TYPE_CHECKING or not yaml.__with_libyaml__:  # noqa: SIM108 (type checkers take no conditional value as a base)
    _Base = yaml.SafeLoader
else:
    _Base = yaml.CSafeLoader

WHOLE_IS_WRONG = "VP109"
Form = Literal["job", "spec", "pools"]

_HARMLESS = ("name", "display_name", "labels", "state", "create_time", "start_time", "end_time", "update_time", "error")
_JOB_KEYS = {"job_spec": "CustomJob", "trial_job_spec": "HyperparameterTuningJob"}


@dataclass(frozen=True)
class SpecFile:
    """A CustomJobSpec from a file. The file's spelling is that of most field names."""

    content: Mapping[str, object]
    region: str  # empty where the file does not say it
    spelling: Spelling
    form: Form
    root: str  # path of the spec inside the file
    names: Mapping[FieldPath, str]  # path in snake_case -> the last field as written
    around: Mapping[str, object] = field(default_factory=dict)  # other fields of a whole job, in snake_case
    study: Mapping[str, object] = field(default_factory=dict)  # those of a tuning job as written

    @property
    def is_of_a_search(self) -> bool:
        """Return whether the spec is that of a hyperparameter tuning job's trials."""
        return snake_case(self.root) == "trial_job_spec"

    @property
    def not_checked(self) -> list[str]:
        """Fields around the spec, as they stand in the file, that no rule looks at."""
        checked = CHECKED if self.is_of_a_search else ()
        return [str(name) for name in self.around if name not in (*_JOB_KEYS, *_HARMLESS, *checked)]

    def fields(self) -> ReadSpec:
        """The spec in the API's types and snake_case names, without what cannot be read."""
        return read_message(self.content, spelling=self.spelling).spec

    def name_path(self, path: FieldPath) -> str:
        """The path as it stands in the file."""
        text = self.root
        for length, part in enumerate(path, 1):
            if isinstance(part, int):
                text += f"[{part}]"
            elif self.form != "pools" or length > 1:
                name = self.names.get(path[:length]) or self.spell(part)
                text += f".{name}" if text else name
        return text or "(the whole file)"

    def spell(self, name: str) -> str:
        """A field's name in the file's spelling."""
        return camel_case(name) if self.spelling == "camelCase" and name in _long_names() else name

    def check(self, catalog: Catalog, region: str = "") -> list[Violation]:
        """Everything that `check_spec` finds, in the file's terms."""
        violations = check_spec(
            self.content[POOLS] if self.form == "pools" else self.content,
            region=region or self.region,
            catalog=catalog,
            name_path=self.name_path,
            spelling=self.spelling,
        )
        if self.form == "pools":  # which a file may hold: the SDK takes the list as an argument
            violations = [violation for violation in violations if violation.code != WHOLE_IS_WRONG]
        if self.is_of_a_search:
            study = list(study_violations(self.study, self.fields(), self.spelling))
            named = [violation.named(self._path_of_study) for violation in study]
            places = {violation.path for violation in named if violation.code == "VP804"}
            doubled = [violation for violation in violations if violation.code == "VP709" and violation.path in places]
            return [self._in_its_spelling(violation) for violation in (*violations, *named) if violation not in doubled]
        return [self._in_its_spelling(violation) for violation in violations]

    def _path_of_study(self, path: FieldPath) -> str:
        if path[:1] == ("trial_job_spec",):
            return self.name_path(path[1:])
        return path_text(tuple(part if isinstance(part, int) else self.spell(part) for part in path), "")

    def _in_its_spelling(self, violation: Violation) -> Violation:
        if self.spelling == "snake_case":
            return violation
        return replace(violation, expected=_in_camel_case(violation.expected), fix=_in_camel_case(violation.fix))


def read_spec_file(path: str | Path) -> SpecFile:
    """Read a job spec. Raises ConfigError for a file that cannot be read, is no YAML or JSON, or names a key twice."""
    text = read_text(Path(path), "a job spec")
    content = _parse(text, str(path))
    kind = kind_of_content(content) if isinstance(content, Mapping) else None
    if kind and kind is not JOB_SPEC:
        raise ConfigError(f"{path} is {kind.name}", expected="a CustomJob's spec", fix=kind.fix_for(path))
    if not isinstance(content, Mapping | list):
        content_kind = "empty" if content is None else f"a {type(content).__name__}"
        raise ConfigError(f"{path} is {content_kind}", expected="a CustomJob, its spec, or a list of worker pools")
    return spec_of(content)


def spec_of(content: Mapping[str, object] | list[object]) -> SpecFile:
    """A CustomJob, a CustomJobSpec (also as `gcloud ai custom-jobs create --config` takes it) or a list of pools."""
    spec, root, form, region = _unwrap(content)
    names = dict(read_message(spec).names)
    if form == "pools":
        del names[(POOLS,)]  # which the file does not have
    num_snake = sum("_" in name for name in names.values())
    num_camel = sum("_" not in name and name != name.lower() for name in names.values())
    spelling: Spelling = "camelCase" if num_camel > num_snake else "snake_case"
    others = {snake_case(str(name)): value for name, value in content.items()} if isinstance(content, Mapping) else {}
    if form == "job" and isinstance(content, Mapping) and snake_case(root) == "trial_job_spec":
        study = {str(name): value for name, value in content.items() if str(name) != root}
        return SpecFile(spec, region, spelling, form, root, names, others, study)
    return SpecFile(spec, region, spelling, form, root, names, others if form == "job" else {})


def _unwrap(content: Mapping[str, object] | list[object]) -> tuple[Mapping[str, object], str, Form, str]:
    if isinstance(content, list):
        return {POOLS: content}, "", "pools", ""
    for name, inner in content.items():
        if snake_case(str(name)) in _JOB_KEYS and isinstance(inner, Mapping) and not _has_pools(content):
            return inner, str(name), "job", _region_of(content)
    return content, "", "spec", ""


def _has_pools(content: Mapping[str, object]) -> bool:
    return any(snake_case(str(name)) == POOLS for name in content)


def _region_of(job: Mapping[str, object]) -> str:
    """From the job's resource name, projects/P/locations/REGION/customJobs/ID, as `describe` prints it."""
    parts = str(job.get("name", "")).split("/")
    return parts[3] if len(parts) > 3 and parts[2] == "locations" else ""


def _in_camel_case(text: str) -> str:
    """`text` with the API's fields in camelCase."""
    for name in _long_names():
        text = text.replace(name, camel_case(name))
    return text


@functools.cache
def _long_names() -> list[str]:
    """Field names of several words, the longest first: one may be part of another."""
    messages = [*load_fields()["messages"].values(), *load_fields()["tuning"]["messages"].values()]
    names = {name for fields in messages for name in fields if "_" in name}
    return sorted(names, key=len, reverse=True)


def _parse(text: str, source: str) -> object:
    """Parse a text as JSON, or else as YAML. Keys that are given twice are an error: one of them would be lost."""
    twice: list[str] = []
    try:
        if text.lstrip()[:1] in ("{", "["):
            try:
                content = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, twice))
                if is_nested_too_deep(content, text):
                    raise RecursionError
            except json.JSONDecodeError:
                twice.clear()
                content = _load_yaml(text, twice)  # YAML has braces too
        else:
            content = _load_yaml(text, twice)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source} is neither YAML nor JSON: {problem}{where}", expected="one job spec") from error
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply", expected="a job spec") from error
    except ValueError as error:
        raise ConfigError(f"{source} holds a value that cannot be read: {error}", expected="a job spec") from error
    if twice:
        raise ConfigError(f"{source} gives keys twice: {', '.join(twice)}", expected="each key once in its object")
    return content


def _once(pairs: list[tuple[str, object]], twice: list[str]) -> dict[str, object]:
    seen: dict[str, object] = {}
    for name, value in pairs:
        if name in seen:
            twice.append(name)
        seen[name] = value
    return seen


def _load_yaml(text: str, twice: list[str]) -> object:
    class Loader(_Base):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
            seen = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    continue
                if key.value in seen and isinstance(key.value, str):
                    twice.append(f"{key.value} (line {key.start_mark.line + 1})")
                seen.add(key.value if isinstance(key.value, str) else id(key))
            return super().construct_mapping(node, deep)

    # A date is no type of a job spec: what looks like one is text.
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in _Base.yaml_implicit_resolvers.items()
    }
    return yaml.load(text, Loader=Loader)
