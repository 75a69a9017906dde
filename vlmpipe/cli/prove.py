"""`vlmpipe prove`: check laws on a run file's trainer."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpipe.cli.arguments import AsJson, Overrides, load, run_files
from vlmpipe.cli.output import print_json, print_lines, to_stderr
from vlmpipe.trainer.errors import ExitCode, UserError

if TYPE_CHECKING:
    from vlmpipe.prove.laws import Verdict


def prove(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="Run file whose trainer is proved; without it, this package's own.",
            autocompletion=run_files,
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    laws: Annotated[
        list[str] | None, typer.Option("--law", metavar="NAME", help="Only this law. Repeatable.", show_default=False)
    ] = None,
    limit_s: Annotated[float, typer.Option("--limit", min=1, metavar="S", help="Seconds of one start.")] = 120.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="New folder for prove.json, prove.html and the starts' logs.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the laws of training on any trainer.

    Checks that 1, 2 and 4 processes and accumulation give the same training, and that it resumes, stops and exports.
    Model and data of the run file are replaced, its train section is not. Ends with exit code 76 where a law does not
    hold or could not be checked.
    """
    from vlmpipe.prove import prove as proving

    def reached(verdict: Verdict) -> None:
        to_stderr(f"{verdict.law}: {verdict.state} ({verdict.seconds:.0f} s)")

    folder = output or Path(tempfile.mkdtemp(prefix="vlmpipe-prove-"))
    proven = proving.prove(
        load(config or proving.DEFAULT_RUN_FILE, overrides),
        folder,
        command=shlex.join(["vlmpipe", *sys.argv[1:]]),
        laws=laws or (),
        limit_s=limit_s,
        reached=reached,
    )
    if as_json:
        print_json(proven.as_json())
    else:
        from vlmpipe.cli.views.laws import print_laws

        print_laws(proven)
        print_lines(["", f"page         {folder / 'prove.html'}", f"logs         {folder}/outputs/runs/*/prove.log"])
    if proven.broken:
        raise UserError(
            f"{len(proven.broken)} of {len(proven.verdicts)} laws do not hold or could not be checked: "
            + ", ".join(breach.law for breach in proven.broken),
            fix="see their causes and cures in the table" if not as_json else "",
            code=ExitCode.REJECTED,
        )
