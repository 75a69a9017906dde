"""`vlmpipe doctor`: whether Google Cloud and the hub have what a run file names, before a run."""

from __future__ import annotations

import typer

from vlmpipe.cli.arguments import AsJson, Overrides, RunFile, load
from vlmpipe.cli.output import doing, print_json


def doctor(config: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Ask Google Cloud and the hub what a run lacks.

    APIs, quotas, images, machines, accounts, permissions, addresses and models: the online half of check. Each question
    is ok, missing with the command that mends it, or cannot be seen and why. Nothing is changed. Ends with exit code 79
    where something is missing, and 69 where nothing could be seen.
    """
    from vlmpipe import api
    from vlmpipe.doctor.rows import as_json as rows_as_json
    from vlmpipe.doctor.rows import exit_code

    settings = load(config, overrides)
    with doing(f"asking about {config}: project, quotas, images, permissions, addresses and models"):
        rows = api.doctor(settings)
    if as_json:
        print_json(rows_as_json(rows))
    else:
        from vlmpipe.cli.views.doctor import print_rows

        print_rows(rows)
    raise typer.Exit(exit_code(rows))
