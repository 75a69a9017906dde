"""Entries of what the calls of a server of tools may cost, held to its caps before anything is sent."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from typing import BinaryIO

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from vlmpipe.trainer.confinement.limits import Limits
from vlmpipe.trainer.errors import ExitCode, UserError, os_errors

FIX = "show a person the plan (vlmpipe submit CONFIG --dry-run), who can start vlmpipe mcp with other caps"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Entry:
    """An approval. It stays where sending failed afterwards: whether something was sent may not be known."""

    name: str
    usd: float
    approved_s: float


def enter(caps: Limits, name: str, usd: float | None, unknown: str) -> None:
    """Add what `name` may cost to the ledger.

    Raises UserError (77) where it is above a cap or not wholly known, or where the ledger cannot be read.
    """
    with os_errors(f"opening the ledger {caps.ledger}"), open(caps.ledger, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        spent = sum(entry.usd for entry in _entries(file, caps.ledger))
        if objection := _objection(caps, name, usd, unknown, spent):
            raise UserError(
                f"not sent: {objection}",
                expected=f"at most ${caps.usd_per_call:,.2f} for a call and ${caps.usd_in_all:,.2f} in all, of which "
                f"${spent:,.2f} are spent",
                fix=FIX,
                code=ExitCode.NO_PERMISSION,
            )
        assert usd is not None
        line = TypeAdapter(Entry).dump_json(Entry(name, usd, time.time()))
        file.seek(0, os.SEEK_END)
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def entries(path: str) -> Sequence[Entry]:
    """The ledger's entries. Raises UserError where it cannot be read."""
    with os_errors(f"opening the ledger {path}"), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return _entries(file, path)


def _entries(file: BinaryIO, path: str) -> list[Entry]:
    read = TypeAdapter(Entry).validate_json
    try:
        return [read(line) for line in file]
    except ValidationError:
        raise UserError(
            f"the ledger {path} is damaged", expected="a line for each approval", fix=FIX, code=ExitCode.NO_PERMISSION
        ) from None


def _objection(caps: Limits, name: str, usd: float | None, unknown: str, spent: float) -> str:
    """Reason against approval; empty where it is. A cap of a cent is not passed by a part of a cent."""
    if usd is None or unknown:
        return f"what {name} will cost is not wholly known: {unknown or 'no plan'}"
    if usd > caps.usd_per_call:
        return f"{name} may cost ${usd:,.2f}, more than a call may"
    if spent + usd > caps.usd_in_all:
        return f"{name} may cost ${usd:,.2f}, which together is more than all calls may"
    return ""
