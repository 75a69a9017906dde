"""Permissions that the accounts of one run need: the table's rows for the resources in its run file."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.access.table import USES, Account, Kind, UseName, fields_of, load_table
from vlmpipe.config.sections.sweep import variants_of
from vlmpipe.trainer.config.sources.data_source import function_named
from vlmpipe.trainer.secret_manager import SECRET_NAME

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

BUCKET, TABLE, REGISTRY = "gs://", "bq://", "vertex://"
BUCKETS: Kind = "bucket"


@dataclass(frozen=True)
class Named:
    """Resource that one field of a run file names: a bucket by its name, a secret without its version, an image, an
    account.

    `row` is the field as the table has it, `value` the field's own text.
    """

    field: str
    row: str
    kind: Kind
    resource: str
    value: str


@dataclass(frozen=True)
class Need:
    """All that one account does with one resource in a run."""

    account: Account
    kind: Kind
    resource: str
    uses: tuple[UseName, ...]
    fields: tuple[str, ...]
    steps: tuple[str, ...]

    @property
    def permissions(self) -> tuple[str, ...]:
        """The permissions that the account needs on the resource."""
        of_kind = load_table().uses[self.kind]
        return tuple(dict.fromkeys(permission for use in self.uses for permission in of_kind[use].permissions))

    def roles(self, missing: set[str]) -> tuple[str, ...]:
        """The least roles that give the `missing` permissions."""
        table = load_table()
        of_kind = table.uses[self.kind]
        requested = {use for use in self.uses if missing & set(of_kind[use].permissions)}
        return tuple(of_kind[use].role for use in table.smallest_roles(self.kind, requested))


def named(config: RunConfig) -> list[Named]:
    """Resources that the run file, its stages and its sweep's variants name, each once, in the order of the table."""
    resources = dict[Named, None]()
    for run in _runs(config):
        content = dict(_texts(run.to_dict()))
        for row in load_table().fields:
            for name in row.names:
                for field in fields_of(name, content):
                    module, _ = function_named(content[field]) or ("", "")  # of a function, its file is read
                    value = module if module.endswith(".py") else content[field]
                    kind, resource = _resource(row.kinds, value)
                    if kind:
                        resources[Named(field, name, kind, resource, value)] = None
    return list(resources)


def conditions(config: RunConfig) -> dict[str, bool]:
    """Conditions of the table that the run meets, by the words of `when`."""
    on_cloud_run = any(run.deploy and run.deploy.cloud_run for run in _runs(config))
    return {"": True, "tensorboard": bool(config.gcp.tensorboard), "cloud_run": on_cloud_run}


def needs(config: RunConfig) -> list[Need]:
    """Needs of each account of the run, one for each account and resource."""
    return _needs_of(named(config))


def _needs_of(every: Sequence[Named]) -> list[Need]:
    resources = defaultdict[str, list[Named]](list)
    for named_resource in every:
        resources[named_resource.row].append(named_resource)
    needs = defaultdict[tuple[Account, Kind, str], tuple[set[UseName], dict[str, None], dict[str, None]]](
        lambda: (set(), {}, {})
    )
    for access in load_table().accesses:
        for named_resource in resources[access.field]:
            if named_resource.kind == access.kind:
                uses, fields, steps = needs[access.account, named_resource.kind, named_resource.resource]
                uses.add(access.use)
                fields[named_resource.field], steps[access.step] = None, None
    return [
        Need(account, kind, resource, tuple(use for use in USES if use in uses), tuple(fields), tuple(steps))
        for (account, kind, resource), (uses, fields, steps) in needs.items()
    ]


def addresses_read(config: RunConfig, account: Account) -> tuple[str, ...]:
    """Addresses in buckets that steps of the account read and do not write, in a run without its sweep's variants."""
    every = named(config.model_copy(update={"sweep": None}))
    only_read = (account, BUCKETS, ("read",))
    buckets = {need.resource for need in _needs_of(every) if (need.account, need.kind, need.uses) == only_read}
    rows = {access.field for access in load_table().accesses if (access.account, access.use) == (account, "read")}
    read = (
        resource
        for resource in every
        if resource.kind == BUCKETS and resource.row in rows and resource.resource in buckets
    )
    return tuple(dict.fromkeys(resource.value for resource in read))


def _runs(config: RunConfig) -> Iterator[RunConfig]:
    yield from config.stage_runs().values()
    for variant in variants_of(config.sweep) if config.sweep else ():
        yield from config.variant(variant).stage_runs().values()


def _texts(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text that is not empty, by its path."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, str) and value:
        yield path, value


def _resource(kinds: tuple[Kind, ...], value: str) -> tuple[Kind | None, str]:
    """The kind and the name of what a value names; no kind for a local path, an id of the hub or an S3 address."""
    if "bucket" in kinds and value.startswith(BUCKET):
        return "bucket", value.removeprefix(BUCKET).partition("/")[0]
    if "table" in kinds and value.startswith(TABLE):
        return "table", value.removeprefix(TABLE).partition("$")[0]  # a partition has no policy of its own
    if "secret" in kinds and (match := re.fullmatch(SECRET_NAME, value)):
        return "secret", match[1]
    if "vertex" in kinds and (value.startswith((REGISTRY, "projects/"))):
        return "vertex", value
    for kind in ("image", "account", "key", "network"):
        if kind in kinds:
            return kind, value
    return None, ""
