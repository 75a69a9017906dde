"""Limits that a server of tools sets for the commands that it starts, and the checks at what reads, writes and runs.

They are one variable of the environment, so that each process of a run has them. Without it nothing is limited, and
pydantic, which reads it, is not imported: every command begins here.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass

from vlmpipe.trainer.confinement import LIMITS_VARIABLE
from vlmpipe.trainer.errors import ExitCode, UserError

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
FILE, BIGQUERY = "file://", "bq://"
HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Limits:
    """Places that the commands of a server may open, and what they may spend.

    `root` and the folders are absolute and without links; `addresses` are beginnings of addresses; `ledger` is the file
    of what was spent. Without `is_enforced`, the kernel does not hold files to the folders.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (pydantic reads the class's own)

    root: str
    ledger: str
    usd_per_call: float = 0.0
    usd_in_all: float = 0.0
    addresses: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    is_enforced: bool = True

    def to_json(self) -> str:
        """The variable's value."""
        return json.dumps(asdict(self))

    def objection(self, text: str) -> str:
        """Why an address or a path leads out of the limits; empty for one that does not, and for other texts."""
        if text.lower().startswith(FILE):
            text = text[len(FILE) :]
        elif SCHEME.match(text):
            is_listed = any(is_below(text, address) for address in self.addresses)
            return "" if is_listed else "an address that this server does not list"
        place = os.path.realpath(os.path.join(self.root, os.path.expanduser(text)))
        return "" if is_below(place, self.root) else f"outside the root {self.root}"


def is_below(place: str, root: str) -> bool:
    """Return whether a path or an address is `root` or in it, by its text. The root bq:// has all of its scheme.

    Parts of a table's address are parted by dots, all others by slashes: gs://mine.others is another bucket.
    """
    if ".." in place.split("/"):
        return False
    separator = "." if root.startswith(BIGQUERY) else "/"
    return place == root or place.startswith(root if root.endswith(("/", separator)) else root + separator)


def limits() -> Limits | None:
    """The limits of this process; None without any. Raises UserError for a variable that cannot be read."""
    if not (value := os.environ.get(LIMITS_VARIABLE)):
        return None
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Limits).validate_json(value)
    except ValidationError as error:
        raise UserError(
            f"{LIMITS_VARIABLE} has {error.error_count()} problems",
            expected="what vlmpipe mcp sets",
            fix="remove the variable",
        ) from None


def require_address(address: str) -> None:
    """Raise UserError (77) for an address of a service that the limits do not list."""
    if (held := limits()) and (objection := held.objection(address)):
        raise UserError(
            f"{address} is {objection}",
            expected=f"one of {', '.join(held.addresses)}"
            if held.addresses
            else "files below the root: none is listed",
            fix="ask the person who starts the server: vlmpipe mcp --address ADDRESS",
            code=ExitCode.NO_PERMISSION,
        )


def require_own_code(what: str) -> None:
    """Raise UserError (77) before code of the user's own is run: it could do all that the user may."""
    if limits():
        raise UserError(
            f"{what} runs code of your own",
            expected="no code but that of vlmpipe, for a command that a server of tools starts",
            fix="ask the person to run it: vlmpipe run CONFIG",
            code=ExitCode.NO_PERMISSION,
        )
