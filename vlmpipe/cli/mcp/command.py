"""`vlmpipe mcp`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer


def mcp(
    context: typer.Context,
    root: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder that commands may read and write, and run in.")
    ] = Path(),
    max_usd_per_call: Annotated[
        float, typer.Option(min=0.0, metavar="USD", help="Most US dollars that one call may cost.")
    ] = 0.0,
    max_usd: Annotated[
        float, typer.Option(min=0.0, metavar="USD", help="Most US dollars that all calls may cost together.")
    ] = 0.0,
    address: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Beginning of addresses that may be read and written, such as gs://my-bucket/runs. Repeatable; "
            "default none.",
            show_default=False,
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMMAND",
            help="A command that changes a service without a question, such as cancel, as a tool too. Repeatable.",
            show_default=False,
        ),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep what calls cost in this file, also for the next start. Default a temporary one of this start.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0.0, max=3600.0, metavar="S", help="Seconds after which a call is left running.")
    ] = 30.0,
    without_landlock: Annotated[
        bool,
        typer.Option(
            "--without-landlock",
            help="Where the kernel cannot hold files to the root: check arguments and run files only.",
        ),
    ] = False,
) -> None:
    """Serve the commands as tools for an agent. On standard input and output (MCP), within a folder and a cap.

    Reading is free. What costs money is refused above the caps, by default always, whatever the run file says.
    """
    from vlmpipe.cli.mcp.server import serve
    from vlmpipe.cli.mcp.session import Session, Settings

    settings = Settings(
        root=root,
        max_usd_per_call=max_usd_per_call,
        max_usd=max_usd,
        addresses=tuple(address or ()),
        allowed=tuple(allow or ()),
        ledger=ledger,
        wait_s=wait,
        is_enforced=not without_landlock,
    )
    serve(Session(cast(typer.Context, context.find_root()), settings))
