"""Collectives by which all ranks agree on a value or raise the same error. They wait for a rank for hours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from vlmpipe.trainer.distributed.process import ProcessContext, patient_group
from vlmpipe.trainer.errors import ExitCode, UserError, os_errors

T = TypeVar("T")


def agree(value: T) -> T:
    """Rank 0's value on all ranks. Collective."""
    shared: list[T] = [value]
    dist.broadcast_object_list(shared, src=0, group=patient_group())
    return shared[0]


def gather(value: T, worker: ProcessContext) -> list[T]:
    """Each rank's value, by rank, on all ranks. Collective."""
    values: list[T] = [value] * worker.world_size
    dist.all_gather_object(values, value, group=patient_group())
    return values


def on_any(worker: ProcessContext, value: bool) -> bool:
    """Return whether a value is true on any rank. Collective."""
    return any(gather(value, worker))


def meet(worker: ProcessContext) -> None:
    """Wait until all ranks are here. Collective."""
    if worker.world_size > 1:
        dist.barrier(group=patient_group())


def together(worker: ProcessContext, doing: str, action: Callable[[], T]) -> T:
    """The result of `action` on each rank; an error of one is raised on all. Collective."""
    error: UserError | None = None
    result: T | None = None
    try:
        with os_errors(doing):
            result = action()
    except UserError as found:
        error = found
    except Exception as found:  # the other ranks must not wait for this one
        error = UserError(f"{doing} failed: {type(found).__name__}: {found}", code=ExitCode.UNEXPECTED)
    raise_together(error, worker)
    return cast(T, result)


def on_first(worker: ProcessContext, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; all ranks return its result or raise its UserError. Collective."""
    error: UserError | None = None
    result: T | None = None
    if worker.is_first:
        try:
            result = action()
        except UserError as found:
            error = found
    raise_together(error, worker)
    return cast(T, agree(result))


def raise_together(error: UserError | None, worker: ProcessContext) -> None:
    """Raise on all ranks when any has an error, preferably one that names its cause. Collective."""
    fields = (error.found, error.expected, error.fix, int(error.code), error.passes) if error else None
    gathered: list[tuple[str, str, str, int, bool] | None] = [None] * worker.world_size
    dist.all_gather_object(gathered, fields, group=patient_group())
    if errors := [fields for fields in gathered if fields]:
        # Of several causes, one that does not pass by itself.
        problem, expected, fix, code, passes = min(
            errors, key=lambda fields: (fields[3] == ExitCode.UNEXPECTED, fields[4])
        )
        raise UserError(problem, expected=expected, fix=fix, code=code, passes=passes)
