"""Rules VP1xx: fields, spellings and types. What people most often write instead is in `fields.yaml`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vlmpipe.config.validation_errors import did_you_mean
from vlmpipe.job_spec.rules.base import Breach, Job, read_yaml
from vlmpipe.job_spec.schema import FieldPath, Kind, Problem, kind_of, load_fields, read_field, read_message, snake_case
from vlmpipe.job_spec.worker_pools import POOLS

MOST_VARIABLES = 100
DEPRECATED_STRATEGIES = {"ON_DEMAND": "STANDARD", "LOW_COST": "SPOT"}
# What a list of pools alone does not say; the SDK and the pipeline component take it beside the list.
BESIDE_POOLS: tuple[FieldPath, ...] = (("scheduling",), ("service_account",))

CODES = {
    Kind.UNKNOWN_FIELD: "VP101",
    Kind.SPELLING: "VP102",
    Kind.TYPE: "VP103",
    Kind.NO_LIST: "VP112",
    Kind.NOT_WHOLE: "VP104",
    Kind.NUMBER_FORM: "VP105",
    Kind.ENUM: "VP106",
    Kind.DURATION: "VP108",
    Kind.ENV: "VP110",
}


@dataclass(frozen=True)
class Understood:
    """A spec as far as it could be read, the paths that could not, and what breaks the rules of form."""

    spec: Mapping[str, Any]
    unread: frozenset[FieldPath]
    breaches: tuple[Breach, ...]
    written: Mapping[FieldPath, FieldPath]  # where a value was read -> where it stands, if that is another place


def understand(content: Any) -> Understood:
    """Read what is meant to be a CustomJobSpec. Never raises for bad content.

    A value in a field that the API does not have is read where it was meant to go, so that one mistake is said once:
    a machine type directly in a pool is no field, but the pool does have a machine type.
    """
    breaches, content, unread = _unwrapped(content)
    reading = read_message(content)
    written: dict[FieldPath, FieldPath] = {}
    for problem in reading.problems:
        breaches.append(_breach(problem))
        path = problem.path
        if problem.kind == Kind.UNKNOWN_FIELD:
            path = _meant_for(problem)
            moved, problems = _move(reading.fields, problem, path)
            breaches += [_breach(inner) for inner in problems]
            if moved:
                written[path] = problem.path
        if _look_up(reading.fields, path) is None:
            unread.add(path)
    return Understood(reading.fields, frozenset(unread), tuple(breaches), written)


def check(job: Job) -> Iterator[Breach]:
    """Rules about values that the API's messages can hold."""
    strategy = job.scheduling("strategy")
    if strategy in DEPRECATED_STRATEGIES:
        instead = DEPRECATED_STRATEGIES[strategy]
        yield Breach("VP107", ("scheduling", "strategy"), strategy, "STANDARD, SPOT or FLEX_START", f"write {instead}")
    for pool in job.pools:
        for path, task in pool.tasks():
            count = len(task.get("env") or ())
            if count > MOST_VARIABLES:
                fix = "put them into a file in Cloud Storage"
                yield Breach("VP111", (*path, "env"), f"{count} variables", f"at most {MOST_VARIABLES}", fix)


def _unwrapped(content: Any) -> tuple[list[Breach], Mapping[str, Any], set[FieldPath]]:
    """What is wrong with the whole, the spec in it, and fields that may be set although they are not there."""
    if isinstance(content, list | tuple):
        breach = Breach("VP109", (), "a list", "an object", f"write {POOLS}: before the list")
        return [breach], {POOLS: content}, set(BESIDE_POOLS)
    if not isinstance(content, Mapping):
        return [Breach("VP103", (), kind_of(content), "an object with fields of CustomJobSpec")], {}, {(POOLS,)}
    for name in ("job_spec", "jobSpec"):
        if isinstance(content.get(name), Mapping) and not {POOLS, "workerPoolSpecs"} & set(content):
            breach = Breach("VP109", (), "a whole CustomJob", "its spec", f"give what is under {name}")
            return [breach], content[name], set()
    return [], content, set()


@functools.cache
def _advice() -> Mapping[tuple[str, str], Mapping[str, str]]:
    """(message, name that the API does not have) -> where it goes, or what to do."""
    return {
        (message, name): entry
        for message, entries in read_yaml("fields.yaml").items()
        for entry in entries
        for name in entry["names"]
    }


def _advice_for(problem: Problem) -> Mapping[str, str]:
    return _advice().get((problem.message, snake_case(str(problem.path[-1]))), {})


def _meant_for(problem: Problem) -> FieldPath:
    """The field that an unknown one was most likely meant to be; itself where none is near."""
    *parents, name = problem.path
    if target := _advice_for(problem).get("to"):
        return (*parents, *target.split("."))
    hint = did_you_mean(snake_case(str(name)), list(load_fields()["messages"][problem.message]))
    return (*parents, hint.removeprefix("; did you mean ").removesuffix("?") or name)


def _move(spec: dict[str, Any], problem: Problem, path: FieldPath) -> tuple[bool, tuple[Problem, ...]]:
    """Put the value of an unknown field where it was meant to go, if that is free and takes it.

    Returns whether that was done, and what is wrong with the value itself.
    """
    if problem.value is None or not _advice_for(problem).get("to"):
        return False, ()
    place: Any = spec
    for part in problem.path[:-1]:
        place = place[part] if isinstance(part, int) else place.get(part)
        if place is None:
            return False, ()
    fields, message = load_fields()["messages"], problem.message
    *parents, name = path[len(problem.path) - 1 :]
    for parent in parents:
        place, message = place.setdefault(parent, {}), fields[message][parent]
    value, problems = read_field(problem.value, fields[message][name], problem.path)
    moved = value is not None and name not in place
    if moved:
        place[name] = value
    return moved, problems


def _look_up(value: Any, path: FieldPath) -> Any:
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(str(part))
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part] or None  # an empty object stands for one that could not be read
        else:
            return None
    return value


def _breach(problem: Problem) -> Breach:
    expected, fix = problem.expected, problem.fix
    if problem.kind == Kind.UNKNOWN_FIELD and not fix and (advice := _advice_for(problem)):
        target = advice.get("to")
        expected = (
            f"{target}, seen from the {problem.message}" if target else f"only fields that a {problem.message} has"
        )
        fix = "move it there" if target else advice["fix"]
    return Breach(CODES[problem.kind], problem.path, problem.found, expected, fix)
