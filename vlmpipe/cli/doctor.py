"""`vlmpipe doctor`: whether Google Cloud and the hub have what a run file names, before a run."""

from __future__ import annotations

import typer

from vlmpipe.cli.arguments import AsJson, Overrides, RunFile, load
from vlmpipe.cli.output import doing, print_json, print_lines


def doctor(config: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Ask Google Cloud and the hub what a run lacks.

    APIs, quotas, images, machines, accounts, permissions, addresses and models: the online half of check. Each question
    is ok, missing with the command that mends it, or cannot be seen and why. Nothing is changed; what the answers show
    of docs/reference/unproved.md is noted beside the runs. Ends with exit code 79 where something is missing, and 69
    where nothing could be seen.
    """
    from vlmpipe import api
    from vlmpipe.doctor.rows import as_json as rows_as_json
    from vlmpipe.doctor.rows import exit_code
    from vlmpipe.doctor.sightings import note_rows, sightings_of

    settings = load(config, overrides)
    with doing(f"asking about {config}: project, quotas, images, permissions, addresses and models"):
        rows = api.doctor(settings)
        notes = note_rows(settings, rows)
    if as_json:
        seen = [{"id": one.id, "holds": one.holds, "said": one.said} for one in sightings_of(rows)]
        print_json({**rows_as_json(rows), "assumptions": seen, "notes": notes})
    else:
        from vlmpipe.cli.views.doctor import print_rows

        print_rows(rows)
        if notes:
            print_lines(["", *notes])
    raise typer.Exit(exit_code(rows))
