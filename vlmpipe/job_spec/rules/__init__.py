"""Rules about CustomJob specs: all problems of a spec at once, each with its code, what is right and the source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.redaction import redact
from vlmpipe.job_spec.rules import environment as containers
from vlmpipe.job_spec.rules import fields as structure
from vlmpipe.job_spec.rules import images, machines, nccl, network, scheduling, secrets
from vlmpipe.job_spec.rules import worker_pools as pools
from vlmpipe.job_spec.rules.base import RULES, Breach, Job, Rule, Violation
from vlmpipe.job_spec.schema import FieldPath, path_text

if TYPE_CHECKING:
    from vlmpipe.catalog.machines import Catalog

__all__ = ["RULES", "Rule", "Violation", "check_spec", "markdown"]

SUBJECTS: tuple[Callable[[Job], Iterator[Breach]], ...] = (
    structure.check, pools.check, machines.check, scheduling.check, network.check, images.check, secrets.check,
    containers.check, nccl.check,
)  # fmt: skip
HEADER = """# Job spec rules

The rules that `vlmpipe check` applies to the CustomJob specs of a run file, and to any CustomJob spec
(`vlmpipe check --job-spec FILE`).

| severity | meaning |
|---|---|
| error | Vertex AI refuses the job, or does something other than the spec says; the command ends with exit code 64 |
| warning | the job works, with a drawback |

This page is generated: `python -m vlmpipe.job_spec.rules > docs/reference/job-spec-rules.md`. A test compares it with
the code.

| code | severity | what is found | source |
|---|---|---|---|
"""


def check_spec(
    spec: Any,
    *,
    region: str = "",
    catalog: Catalog,
    name_path: Callable[[FieldPath], str] = path_text,
) -> list[Violation]:
    """Everything that is wrong with a CustomJobSpec. Never raises for bad content.

    Args:
        spec: the spec with the API's snake_case names. A bare list of worker pools is a violation, and read all the
            same.
        region: where the job is to run; empty leaves out what depends on it.
        catalog: the machines that Vertex AI offers.
        name_path: how a field is called in the answer.
    """
    understood = structure.understand(spec)
    job = Job(understood.spec, understood.unread, region, catalog)
    breaches = [*understood.breaches, *(breach for check in SUBJECTS for breach in check(job))]
    return [violation_of(breach, lambda path: name_path(_as_written(path, understood.written))) for breach in breaches]


def violation_of(breach: Breach, name_path: Callable[[FieldPath], str] = path_text) -> Violation:
    """The breach with what its rule says, and without secrets that were pasted into odd places."""
    rule = RULES[breach.code]
    return Violation(
        code=rule.code,
        severity=rule.severity,
        path=redact(name_path(breach.path)),
        found=redact(breach.found),
        expected=redact(breach.expected),
        fix=redact(breach.fix),
        source=rule.source,
    )


def _as_written(path: FieldPath, written: Mapping[FieldPath, FieldPath]) -> FieldPath:
    """Where a value that was read in its right place really stands."""
    for length in range(len(path), 0, -1):
        if path[:length] in written:
            return (*written[path[:length]], *path[length:])
    return path


def markdown() -> str:
    """The reference page."""
    rows = [f"| {rule.code} | {rule.severity} | {rule.title} | {rule.source} |" for rule in RULES.values()]
    return HEADER + "\n".join(rows) + "\n"
