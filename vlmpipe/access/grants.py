"""The table as Terraform's module reads it: grants.json, with the accounts, their roles and who reads which secret."""

from __future__ import annotations

import json
from collections import defaultdict

from vlmpipe.access.table import Access, Table, UseName, load_table

FILE = "terraform/modules/vlmpipe/grants.json"
OPTIONAL_BUCKET = "mirror"


def grants_json() -> str:
    """Content of grants.json. `when` is empty, or the setting that the grant depends on."""
    table = load_table()
    content = {
        "accounts": table.accounts,
        "project": {f"{row.account}-{_short(row.role)}": row.model_dump() for row in table.project},
        "buckets": _buckets(table),
        "act_as": _act_as(table),
        "repositories": {f"{row.account}-{row.repository}": row.model_dump() for row in table.repositories},
        "tokens": {f"{row.account}-of-{row.of}": row.model_dump() for row in table.tokens},
        "secrets": secret_readers(table),
    }
    return json.dumps(content, indent=2) + "\n"


def secret_readers(table: Table) -> dict[str, list[str]]:
    """The accounts that read the secrets of each field of the run file; of maps and lists by the field itself."""
    readers = defaultdict[str, list[str]](list)
    for access in table.accesses:
        field = access.field.removesuffix(".*")
        if access.kind == "secret" and access.account not in readers[field]:
            readers[field].append(access.account)
    return {field: sorted(accounts) for field, accounts in sorted(readers.items())}


def _buckets(table: Table) -> dict[str, object]:
    """Grants on the module's own buckets: for each account the least roles that all its uses there need."""
    accesses = defaultdict[tuple[str, str], list[Access]](list)
    for access in table.accesses:
        if access.kind == "bucket":
            accesses[access.account, access.home].append(access)
    grants: dict[str, object] = {}
    for (account, bucket), of_bucket in sorted(accesses.items()):
        for use in table.smallest_roles("bucket", {access.use for access in of_bucket}):
            covered = [access for access in of_bucket if _covers(table, use, access.use)]
            grants[f"{account}-{bucket}-{use}"] = {
                "account": account,
                "bucket": bucket,
                "role": table.uses["bucket"][use].role,
                "when": OPTIONAL_BUCKET if bucket == OPTIONAL_BUCKET else "",
                "why": _reason(covered),
            }
    for row in table.buckets:
        role = table.uses["bucket"][row.use].role
        grants[f"{row.account}-{row.home}-{row.use}"] = {
            "account": row.account, "bucket": row.home, "role": role, "when": "", "why": row.why,
        }  # fmt: skip
    return grants


def _act_as(table: Table) -> dict[str, object]:
    grants: dict[str, object] = {}
    for access in table.accesses:
        if access.kind == "account":
            role = table.uses["account"][access.use].role
            grants[f"{access.account}-as-{access.home}"] = {
                "account": access.account, "as": access.home, "role": role, "why": access.why,
            }  # fmt: skip
    return grants


def _reason(accesses: list[Access]) -> str:
    """The steps and the fields. Each field's reason stands in the table."""
    steps = dict.fromkeys(access.step for access in accesses)
    fields = dict.fromkeys(access.field for access in accesses)
    return f"{', '.join(steps)}: {', '.join(fields)}"


def _covers(table: Table, use: UseName, other: UseName) -> bool:
    permissions = table.uses["bucket"]
    return set(permissions[other].permissions) <= set(permissions[use].permissions)


def _short(role: str) -> str:
    return role.removeprefix("roles/").replace(".", "-")
