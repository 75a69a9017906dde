"""Pages that are made from the table of accesses: docs/reference/access.md, and sentences inside the guides."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT
from vlmpipe.access.table import Access, Account, UseName, load_table

PAGE = ROOT / "docs/reference/access.md"
GUIDES = ROOT / "docs/how-to"
BLOCK = re.compile(r"(<!-- readers of ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)
IN_RUN_FILE = {"pipeline": "gcp.service_account", "trainer": "gcp.job_service_account"}
COLUMNS: tuple[Account, ...] = ("submitter", "pipeline", "trainer")
WORDS: dict[UseName, str] = {
    "look": "looks up the bucket", "read": "reads", "add": "adds", "write": "reads, writes and deletes",
    "act_as": "acts as",
}  # fmt: skip
HEADER = """# Who reads and writes what

Which step of a run opens what a run file names, as which account. The grants of Terraform's module, the sentences about
accounts in the guides and the questions of
[`vlmpipe doctor`](../how-to/first-run-on-vertex.md#ask-google-cloud-whether-a-run-could-start) are made from the same
table, `vlmpipe/access/table.yaml`.

No step has run against Google Cloud with these grants. The tests hold the table against the run file's schema and the
steps of every shipped pipeline.

This page is generated: `python -m tests.support.generated_files`. A test compares it with the table.

## Accounts

| account | what it is |
|---|---|
"""
ACCESSES = """
`submit` stands for the commands on your machine that start and follow runs, `start-jobs` for the steps that create and
watch a job, `trial` for a job of `vlmpipe tune`, and `probe` for one of `vlmpipe submit --only probe`. The other names
are those of the [steps](../how-to/runs.md). Without `gcp.job_service_account`, jobs run as `gcp.service_account`,
which then needs both.

## Accesses

"""
AGENTS = """
## Used by Google's service agents

| field | why |
|---|---|
"""
ROLES = """
## Roles

The least predefined role of each use. On a bucket, a role of a wider use has those of a narrower one only where its
permissions contain them.

| resource | use | role | permissions |
|---|---|---|---|
"""
PROJECT = """
## Roles on the project

| account | role | why |
|---|---|---|
"""


def access_page() -> str:
    """docs/reference/access.md."""
    table = load_table()
    parts = [HEADER, *(f"| `{account}` | {text} |\n" for account, text in table.accounts.items()), ACCESSES]
    parts += [f"| field | {' | '.join(COLUMNS)} | why |\n|---|---|---|---|---|\n", *_accesses(), AGENTS]
    for row in table.fields:
        if not any(row.steps(use) for use in WORDS):
            parts.append(f"| {', '.join(f'`{name}`' for name in row.names)} | {row.why} |\n")
    parts.append(ROLES)
    for kind, uses in table.uses.items():
        for use, one in uses.items():
            permissions = ", ".join(f"`{permission}`" for permission in one.permissions)
            parts.append(f"| {kind} | {WORDS[use]} | `{one.role}` | {permissions} |\n")
    parts.append(PROJECT)
    for role in table.project:
        when = f" Only with `{role.when} = true`." if role.when else ""
        parts.append(f"| `{role.account}` | `{role.role}` | {role.why}{when} |\n")
    return "".join(parts)


def _accesses() -> Iterator[str]:
    """A line for each row: what each account does, in which steps."""
    table = load_table()
    for row in table.fields:
        cells = defaultdict[Account, list[str]](list)
        for use in WORDS:
            steps = defaultdict[Account, list[str]](list)
            for step in row.steps(use):
                steps[table.steps[step]].append(f"`{step}`")
            for account, listed in steps.items():
                cells[account].append(f"{WORDS[use]}: {', '.join(listed)}")
        if cells:
            columns = " | ".join("; ".join(cells[account]) or "–" for account in COLUMNS)
            yield f"| {', '.join(f'`{name}`' for name in row.names)} | {columns} | {row.why} |\n"


def filled(text: str) -> str:
    """A guide's text with its sentences about a field's readers as the table has them."""
    return BLOCK.sub(lambda block: f"{block[1]}{readers_sentence(block[2])}\n{block[3]}", text)


def readers_sentence(field: str) -> str:
    """Who must be allowed to read the secret of a field; `secrets` stands for each of the map's values."""
    found: list[Access] = [
        access
        for access in load_table().accesses
        if access.field.removesuffix(".*") == field and access.kind == "secret"
    ]
    assert found, f"no row for {field}"
    accounts = [f"`{name}`" for account, name in IN_RUN_FILE.items() if account in {access.account for access in found}]
    who = " and ".join(accounts) + (", which need" if len(accounts) > 1 else ", which needs")
    return (
        f"`{field}` is read by {who} `roles/secretmanager.secretAccessor` on the\n"
        f'secret. With Terraform: `secrets = {{ NAME = ["{field}"] }}` ([who reads what](../reference/access.md)).'
    )


def guides() -> dict[Path, str]:
    """Each guide with such sentences, and its text as it should be."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(GUIDES.glob("*.md"))}
    return {path: filled(text) for path, text in texts.items() if BLOCK.search(text)}
