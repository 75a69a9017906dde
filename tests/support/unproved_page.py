"""docs/reference/unproved.md, generated from vlmpipe/catalog/unproved.yaml."""

from __future__ import annotations

from itertools import groupby

from tests.support.paths import ROOT
from vlmpipe.catalog.unproved import FOLDER, Assumption, load_assumptions

PAGE = ROOT / "docs/reference/unproved.md"
HEADER = f"""# What is not proved

This project has never met the real services. Each line is something that its code relies on, and what the first real
run shows. Everything that a service's own API descriptions refuse is refused by the stand-ins of the tests, too.

A tool that sees whether an assumption holds writes that to `{FOLDER}/<id>.json` in the folder of all runs
(`output.root_uri`), once, and says in a note what is new or contradicted: `vlmpipe doctor CONFIG`, a probe
(`vlmpipe submit CONFIG --only probe`) and `vlmpipe diagnose RUN`, on Vertex AI.
*people* are lines that only a person can see; please report what you saw with the id.

This page is generated from `vlmpipe/catalog/unproved.yaml`: `python -m tests.support.generated_files`. A test compares
it with the file.
"""


def unproved_page() -> str:
    """The page: a section for each service."""
    parts = [HEADER]
    ordered = sorted(load_assumptions(), key=lambda one: _services().index(one.service))
    for service, group in groupby(ordered, key=lambda one: one.service):
        parts.append(f"\n## {service}\n\n| id | assumed | the first real run | seen by | source | relied on in |\n")
        parts.append("|---|---|---|---|---|---|\n")
        parts += map(_row, group)
    return "".join(parts)


def _services() -> list[str]:
    return list(dict.fromkeys(one.service for one in load_assumptions()))


def _row(one: Assumption) -> str:
    tools = ", ".join(one.tools)
    return f"| `{one.id}` | {one.assumption} | {one.shown_by} | {tools} | {one.source} | `{one.code}` |\n"
