"""Rules about CustomJob specs: all problems of a spec at once, each with its code, what is right and the source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from vlmpipe.job_spec.rules import environment, fields, images, machines, network, processes, scheduling, worker_pools
from vlmpipe.job_spec.rules.base import Job
from vlmpipe.job_spec.schema import Spelling
from vlmpipe.job_spec.violation import RULES, FieldPath, Rule, Violation, path_text

if TYPE_CHECKING:
    from vlmpipe.catalog.machines import Catalog

__all__ = ["RULES", "Rule", "Violation", "check_spec"]

SUBJECTS = (fields, worker_pools, processes, machines, scheduling, network, images, environment)
CHECKS: tuple[Callable[[Job], Iterator[Violation]], ...] = tuple(subject.check for subject in SUBJECTS)


def check_spec(
    spec: object,
    *,
    region: str = "",
    catalog: Catalog,
    torch_builds: Mapping[str, str] | None = None,
    name_path: Callable[[FieldPath], str] = path_text,
    spelling: Spelling = "snake_case",
) -> list[Violation]:
    """Every violation of a CustomJobSpec. Never raises for bad content.

    Args:
        spec: the spec. A bare list of worker pools is a violation, but is read.
        region: the job's region; empty skips the rules that depend on it.
        catalog: the machines that Vertex AI offers.
        torch_builds: the build of torch in an image, by the image's address; GPUs of others are not checked against it.
        name_path: the name of a field for the user.
        spelling: of field names; the other one is a violation.
    """
    reading = fields.read_leniently(spec, spelling)
    job = Job(reading.spec, reading.unread, region, catalog, torch_builds or {})
    violations = [*reading.violations, *(violation for check in CHECKS for violation in check(job))]
    return [violation.named(lambda path: name_path(_as_written(path, reading.moved))) for violation in violations]


def _as_written(path: FieldPath, moved: Mapping[FieldPath, FieldPath]) -> FieldPath:
    for length in range(len(path), 0, -1):
        if path[:length] in moved:
            return (*moved[path[:length]], *path[length:])
    return path
