"""The table of accesses: which step opens which resource of the run file, as which account, how and why.

`table.yaml` holds the rows; everything that grants or asks for a permission is made from them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from vlmpipe.config.yaml_loader import packaged_yaml

Account = Literal["submitter", "pipeline", "trainer", "builder", "tester"]
Kind = Literal["bucket", "table", "secret", "account", "image", "vertex", "key", "network"]
UseName = Literal["look", "read", "add", "write", "act_as"]
USES: tuple[UseName, ...] = get_args(UseName)
FILE = "table.yaml"


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Use(_Row):
    """One kind of use: the permissions that it needs, and the least predefined role that has them."""

    role: str
    permissions: tuple[str, ...]


class FieldRow(_Row):
    """Fields of the run file that the same steps open. Without steps, only Google's service agents use them."""

    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    why: str
    home: str = ""
    look: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    add: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    act_as: tuple[str, ...] = ()

    def steps(self, use: UseName) -> tuple[str, ...]:
        """The steps that use the fields in this way."""
        steps: tuple[str, ...] = getattr(self, use)
        return steps


class ProjectRole(_Row):
    """A role on the whole project."""

    account: Account
    role: str
    why: str
    permissions: tuple[str, ...] = ()
    when: str = ""


class Service(_Row):
    """An API that a run needs, if its run file names a resource of this kind, or has what `when` names."""

    name: str
    why: str
    kind: Kind | None = None
    when: str = ""


class BucketUse(_Row):
    """A bucket of Terraform's module that no field of the run file names."""

    account: Account
    home: str
    use: UseName
    why: str


class RepositoryRole(_Row):
    """A role on one of the module's repositories in Artifact Registry."""

    account: Account
    repository: str
    role: str
    why: str


class TokenRole(_Row):
    """An account that may take tokens of another one."""

    account: Account
    of: Account
    why: str
    when: str


@dataclass(frozen=True)
class Access:
    """A step's access to what a field of the run file names. `field` has [] for list elements and * for map values."""

    step: str
    account: Account
    field: str
    kind: Kind
    use: UseName
    home: str
    why: str


class Table(_Row):
    """The file, checked."""

    accounts: dict[Account, str]
    steps: dict[str, Account]
    uses: dict[Kind, dict[UseName, Use]]
    fields: tuple[FieldRow, ...]
    project: tuple[ProjectRole, ...]
    buckets: tuple[BucketUse, ...]
    repositories: tuple[RepositoryRole, ...]
    tokens: tuple[TokenRole, ...]
    services: tuple[Service, ...]

    @model_validator(mode="after")
    def _names_only_what_is_there(self) -> Table:
        names = [name for row in self.fields for name in row.names]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rows name {', '.join(twice)} twice")
        for row in self.fields:
            unknown = {step for use in USES for step in row.steps(use)} - self.steps.keys()
            if unknown:
                raise ValueError(f"{row.names[0]}: no account is given for {', '.join(sorted(unknown))}")
        return self

    @functools.cached_property
    def accesses(self) -> tuple[Access, ...]:
        """Every access, one for each step, field, kind of resource and use."""
        return tuple(self._accesses())

    def _accesses(self) -> Iterator[Access]:
        for row in self.fields:
            for use in USES:
                for step in row.steps(use):
                    for kind in row.kinds:
                        if use in self.uses.get(kind, {}):
                            for name in row.names:
                                yield Access(step, self.steps[step], name, kind, use, row.home, row.why)

    def smallest_roles(self, kind: Kind, uses: set[UseName]) -> list[UseName]:
        """The uses whose roles have the permissions of all `uses`: those that another one does not cover."""
        of_kind = self.uses[kind]
        permissions = {use: set(of_kind[use].permissions) for use in uses}
        return [
            use
            for use in USES
            if use in uses and not any(permissions[use] < permission for permission in permissions.values())
        ]


@functools.cache
def load_table() -> Table:
    """The table of this package."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    return Table.model_validate(packaged_yaml(text))


def fields_of(name: str, content: Collection[str]) -> Iterable[str]:
    """The paths in a run file's content that a row's field stands for, in their order: [] is an index, * a key."""
    if not {"[]", "*"} & {*name.split(".")}:
        return [name] if name in content else []
    return filter(_field_pattern(name).fullmatch, content)


@functools.cache
def _field_pattern(name: str) -> re.Pattern[str]:
    parts = [r"\d+" if part == "[]" else "[^.]+" if part == "*" else re.escape(part) for part in name.split(".")]
    return re.compile(r"\.".join(parts))
