"""Follow a run to its end, show how it ended, and leave with its exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import typer

from vlmpipe.cli.output import print_json, print_lines, to_stderr
from vlmpipe.trainer.errors import ExitCode, UserError

if TYPE_CHECKING:
    from vlmpipe.platforms.base import Status


def watch_and_show(
    run: str,
    read: Callable[[], Status],
    *,
    on_service: bool,
    plain: bool,
    as_json: bool,
    fail_on_reject: bool = False,
) -> Status:
    """Follow a run to its end and show how it ended."""
    result = follow(run, read, on_service=on_service, plain=plain or as_json, say=to_stderr if as_json else print)
    show_end(result, as_json=as_json, fail_on_reject=fail_on_reject)
    return result


def show_end(result: Status, *, as_json: bool, fail_on_reject: bool) -> None:
    """Print how a run ended: as JSON with the exit code that `leave` ends this command with."""
    if as_json:
        code = ExitCode.REJECTED if _is_rejected(result, fail_on_reject) else result.exit_code
        print_json({**result.as_json(), "exit_code": code})
    else:
        print_lines(["", *result.lines()])


def follow(
    run: str, read: Callable[[], Status], *, on_service: bool, plain: bool, say: Callable[[str], None] = to_stderr
) -> Status:
    """Follow a run to its end."""
    from vlmpipe.runs.live_view import view_for
    from vlmpipe.runs.watch import LOCAL_POLL_S, SERVICE_POLL_S, watch

    view = view_for(plain=plain, say=say)
    return watch(run, read, view, every_s=SERVICE_POLL_S if on_service else LOCAL_POLL_S)


def leave(result: Status, fail_on_reject: bool) -> NoReturn:
    """End with the run's exit code. Raises UserError (76) for a rejected model where `fail_on_reject`."""
    if _is_rejected(result, fail_on_reject):
        raise UserError(
            f"the gate rejected the model. {result.decision.reason if result.decision else ''}",
            expected="an accepted model, because --fail-on-reject is given",
            fix="train for longer or on other data, or change the gate section of the run file",
            code=ExitCode.REJECTED,
        )
    raise typer.Exit(result.exit_code or 0)


def _is_rejected(result: Status, fail_on_reject: bool) -> bool:
    return fail_on_reject and not result.exit_code and bool(result.decision and not result.decision.accepted)


def show(result: Status, as_json: bool) -> None:
    """Print the status of a run: how it stands, its steps, then its results or what failed."""
    if as_json:
        print_json(result.as_json())
        return
    from vlmpipe.cli.views.tables import print_state
    from vlmpipe.runs.searches import SearchStatus

    if isinstance(result, SearchStatus):  # its lines are the table
        print_lines(result.lines())
        return
    decision, *more = result.lines()
    print_lines([decision, ""])
    print_state(result.state)
    if more:
        print_lines(more if not more[0] else ["", *more])
