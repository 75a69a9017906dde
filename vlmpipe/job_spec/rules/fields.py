"""Rules VP1xx: fields, spellings and types. `fields.yaml` has common mistakes and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vlmpipe.job_spec.read_forms import ReadSpec
from vlmpipe.job_spec.rules.base import Job
from vlmpipe.job_spec.schema import (
    Spelling,
    UnknownField,
    camel_case,
    kind_of,
    load_fields,
    read_field,
    read_message,
    snake_case,
)
from vlmpipe.job_spec.violation import FieldPath, Violation
from vlmpipe.job_spec.worker_pools import POOLS

MAX_VARIABLES = 100
DEPRECATED_STRATEGIES = {"ON_DEMAND": "STANDARD", "LOW_COST": "SPOT"}
JOB = "CustomJobSpec"
BESIDE_POOLS: tuple[FieldPath, ...] = (("scheduling",), ("service_account",))  # given beside a bare list of pools


@dataclass(frozen=True)
class LenientReading:
    """The readable part of a spec, the paths of the rest, and the violations of form."""

    spec: ReadSpec
    unread: frozenset[FieldPath]
    violations: tuple[Violation, ...]
    moved: Mapping[FieldPath, FieldPath]  # path of a value in `spec` -> its path as written, where they differ


def read_leniently(content: object, spelling: Spelling) -> LenientReading:
    """Read what should be a CustomJobSpec. Never raises for bad content.

    A value in an unknown field is moved to the field that was meant, so that one mistake causes one violation: a
    machine type directly in a pool violates VP101, not also the rule that a pool needs a machine type.
    """
    violations, content, unread = _unwrapped(content, spelling)
    reading = read_message(content, spelling=spelling)
    moved: dict[FieldPath, FieldPath] = {}
    violations += reading.violations
    places = [violation.field for violation in reading.violations if violation.code != "VP101"]
    for field in reading.unknown:
        if field.is_of_the_job and (name := snake_case(str(field.path[-1]))) not in reading.fields:
            value, inner = read_field(field.value, load_fields()["messages"][JOB][name], field.path, spelling)
            violations += inner
            if value is not None:
                reading.fields[name] = value
                moved[(name,)] = field.path
        if field.value is not None and field.has_target:
            is_moved, inner = _move(reading.fields, field, spelling)
            violations += inner
            if is_moved:
                moved[field.target] = field.path
        places.append(field.target)
    unread.update(path for path in places if _look_up(reading.fields, path) is None)
    return LenientReading(reading.spec, frozenset(unread), tuple(violations), moved)


def check(job: Job) -> Iterator[Violation]:
    """Check values that have the right form."""
    strategy = job.scheduling.get("strategy")
    if strategy in DEPRECATED_STRATEGIES:
        fix = f"write {DEPRECATED_STRATEGIES[strategy]}"
        yield Violation("VP107", ("scheduling", "strategy"), strategy, "STANDARD, SPOT or FLEX_START", fix)
    for pool in job.pools:
        for path, task in pool.tasks():
            count = len(task.get("env", ()))
            if count > MAX_VARIABLES:
                fix = "put them into a file in Cloud Storage"
                yield Violation("VP111", (*path, "env"), f"{count} variables", f"at most {MAX_VARIABLES}", fix)


def _unwrapped(content: object, spelling: Spelling) -> tuple[list[Violation], Mapping[str, object], set[FieldPath]]:
    """Violations of the whole, the spec in it, and fields that may be set elsewhere."""
    if isinstance(content, list | tuple):
        violation = Violation("VP109", (), "a list", "an object", f"write {POOLS}: before the list")
        name = camel_case(POOLS) if spelling == "camelCase" else POOLS
        return [violation], {name: content}, set(BESIDE_POOLS)
    if not isinstance(content, Mapping):
        return [Violation("VP103", (), kind_of(content), "an object with fields of CustomJobSpec")], {}, {(POOLS,)}
    for name in ("job_spec", "jobSpec"):
        if isinstance(content.get(name), Mapping) and not {POOLS, "workerPoolSpecs"} & set(content):
            violation = Violation("VP109", (), "a whole CustomJob", "its spec", f"give the content of {name}")
            return [violation], content[name], set()
    return [], content, set()


def _move(spec: dict[str, object], field: UnknownField, spelling: Spelling) -> tuple[bool, tuple[Violation, ...]]:
    """Put an unknown field's value into its target, if that is unset and of the right type.

    Returns whether it was moved, and the violations of the value itself.
    """
    holder = _nested(spec, field.path[:-1])
    if not isinstance(holder, dict):
        return False, ()
    place: dict[str, object] = holder
    fields, message = load_fields()["messages"], field.message
    *parents, name = field.target[len(field.path) - 1 :]
    for parent in parents:
        inner = place.setdefault(str(parent), {})
        assert isinstance(inner, dict), f"{parent} is a message"
        place, message = inner, fields[message][str(parent)]
    value, violations = read_field(field.value, fields[message][str(name)], field.path, spelling)
    is_moved = value is not None and name not in place
    if is_moved:
        place[str(name)] = value
    return is_moved, violations


def _nested(value: object, path: FieldPath) -> object:
    """The value at a path of the file's content; None where there is none."""
    for part in path:
        if isinstance(value, list) and isinstance(part, int):
            value = value[part]
        else:
            value = value.get(str(part)) if isinstance(value, Mapping) else None
    return value


def _look_up(value: object, path: FieldPath) -> object:
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(str(part))
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part] or None  # an empty object stands for an unreadable one
        else:
            return None
    return value
