"""`vlmpipe import`: files of guides and of other training programs as run files and job specs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpipe.cli.arguments import AsJson
from vlmpipe.cli.init import create
from vlmpipe.cli.output import doing, print_json, print_lines, print_text
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from vlmpipe.importing.importer import Imported


def import_(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="A job spec (YAML, JSON, or the Python that makes it), ds_config.json, a file with a command, or "
            "settings of TRL, LLaMA-Factory, Axolotl or accelerate.",
            show_default=False,
        ),
    ] = None,
    command: Annotated[
        str,
        typer.Option("--command", metavar="WORDS", help="A command instead of a file, in quotes.", show_default=False),
    ] = "",
    job_spec: Annotated[
        bool, typer.Option("--job-spec", help="Write a corrected job spec instead of a run file. For job specs.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write; without it, the text is printed.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn a guide's file or command into a run file. Each value that is changed, dropped or refused has a comment.

    Nothing of the file is run or fetched, and an existing file is never overwritten. Ends with exit code 64 where the
    file is of no kind that can be imported.
    """
    if (file is None) == (not command):
        problem = "neither a file nor --command given" if file is None else "both a file and --command given"
        raise ConfigError(problem, expected="vlmpipe import FILE, or vlmpipe import --command 'torchrun ...'")
    with doing(f"importing {file or '--command'}"):
        imported = _import(file, command, is_job_spec=job_spec)
    if output:
        create(output, imported.text)
    if as_json:
        print_json({"output": str(output) if output else None, **imported.as_dict()})
        return
    if output is None:
        print_text(imported.text.rstrip("\n"))
        return
    counts = ", ".join(f"{count} {outcome}" for outcome, count in imported.counts().items() if count)
    to_check = f"--job-spec {output}" if job_spec else str(output)
    print_lines([f"{output} written: a {imported.result} from {imported.kind.value}", f"  values: {counts or 'none'}",
                 f"  next: vlmpipe check {to_check}"])  # fmt: skip


def _import(file: Path | None, command: str, *, is_job_spec: bool) -> Imported:
    from vlmpipe.importing.importer import import_job_spec, import_run_file
    from vlmpipe.importing.sources import command_source, read_source

    source = read_source(file) if file else command_source(command)
    return import_job_spec(source) if is_job_spec else import_run_file(source)
