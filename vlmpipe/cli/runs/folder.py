"""`vlmpipe runs`: all runs of an output folder, their sizes and tags, their page, and the removal of some."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from vlmpipe.cli.arguments import AsJson, run_ids
from vlmpipe.cli.output import doing, print_json, print_lines, to_stderr
from vlmpipe.cli.runs.options import Root, Run
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, os_errors
from vlmpipe.trainer.gc_control import collector_off

if TYPE_CHECKING:
    from vlmpipe.inventory.listing import Inventory
    from vlmpipe.inventory.removal import Removal

NEWEST = 50  # runs of a list or a page


class ListByDefault(TyperGroup):
    """`vlmpipe runs`, also with options of `list`, is `vlmpipe runs list`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_list = not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names)
        adds = is_list and not ctx.resilient_parsing  # a shell that completes asks for the names of all commands
        return super().parse_args(ctx, ["list", *args] if adds else args)


app = typer.Typer(help="List, tag and remove the runs of an output folder.", cls=ListByDefault)


class Outcome(StrEnum):
    """How runs ended."""

    running = "running"
    done = "done"
    stopped = "stopped"
    failed = "failed"
    damaged = "damaged"


Names = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="Ids, their beginnings, @last or @last:NAME.", autocompletion=run_ids),
]
Unfinished = Annotated[
    bool, typer.Option("--unfinished", help="Also runs that stopped or failed, which the same command would continue.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")]
Yes = Annotated[bool, typer.Option("--yes", help="Remove without asking.")]
Last = Annotated[int, typer.Option("--last", min=0, metavar="N", help="Only the newest N; 0 for all.")]
Name = Annotated[str, typer.Option(metavar="NAME", help="Only runs of this run file.", show_default=False)]


@app.command("list")
def list_(
    name: Name = "",
    outcome: Annotated[Outcome | None, typer.Option(help="Only runs that ended so.", show_default=False)] = None,
    tag: Annotated[str, typer.Option(help="Only runs with this tag.", show_default=False)] = "",
    last: Last = NEWEST,
    root: Root = "runs",
    as_json: AsJson = False,
) -> None:
    """List the newest runs of this machine, and of those submitted from this folder. Newest last, with sizes."""
    from vlmpipe.cli.views.inventory import print_listing, print_submitted
    from vlmpipe.inventory.listing import Filter, newest_runs
    from vlmpipe.runs.submitted import run_records

    chosen = Filter(name, outcome or "", tag) if name or outcome or tag else None
    with doing(f"reading the runs in {root}"):
        listing = newest_runs(root, last=last, chosen=chosen)
    records = {} if chosen else run_records()
    submitted = dict(list(records.items())[-last:])
    not_submitted = len(records) - len(submitted)
    if as_json:
        elsewhere = [{"run_id": job, **vars(record)} for job, record in submitted.items()]
        shared = listing.shared and [{**vars(data), "folder": str(data.folder)} for data in listing.shared]
        listed = {
            "runs": [run.as_json() for run in listing.runs],
            "submitted": elsewhere,
            "not_listed": listing.left_out + not_submitted,
            "shared": shared,
            "other_bytes": listing.sizes,
        }
        print_json({**listed, "problems": listing.problems})
        return
    print_listing(listing)
    if submitted:
        print_submitted(submitted, not_submitted)


@app.command()
def tag(
    run: Run,
    tags: Annotated[list[str], typer.Argument(metavar="TAG...", help="Words without spaces.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take the tags away.")] = False,
    root: Root = "runs",
    as_json: AsJson = False,
) -> None:
    """Give a run tags. They are listed, filter, and keep it from vlmpipe runs prune."""
    from vlmpipe.inventory.tags import change_tags
    from vlmpipe.platforms.short_names import full_name
    from vlmpipe.runs.folders.summary import find_run

    folder = find_run(root, full_name(run, root)).folder
    tags_now = change_tags(folder, [] if remove else tags, tags if remove else [])
    if as_json:
        print_json({"run_id": folder.name, "tags": tags_now})
    else:
        print_lines([f"{folder.name}: {', '.join(tags_now) or 'no tags'}"])


@app.command()
def rm(
    runs: Names,
    unfinished: Unfinished = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    root: Root = "runs",
    as_json: AsJson = False,
) -> None:
    """Remove runs by name. One that a registry, another run or the same command refers to stays (exit 64)."""
    from vlmpipe.inventory.removal import removal_of
    from vlmpipe.platforms.short_names import full_name

    with collector_off():  # as in prune
        inventory, names = _read(root), [full_name(run, root) for run in runs]
        known = {run.run_id for run in inventory.runs}
        if missing := [name for name in names if name not in known]:
            raise UserError(
                f"no run {missing[0]!r} in {inventory.root}",
                expected="a run of this machine",
                fix="vlmpipe runs list, or give its --root",
                code=ExitCode.NOT_FOUND,
            )
        _remove(removal_of(inventory, names, unfinished=unfinished), dry_run=dry_run, yes=yes, as_json=as_json)


@app.command()
def prune(
    keep: Annotated[int, typer.Option(min=1, metavar="N", help="The newest N runs of each run file stay.")] = 3,
    older_than_days: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Only runs that began so long ago.", show_default=False)
    ] = 0,
    name: Name = "",
    unfinished: Unfinished = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    root: Root = "runs",
    as_json: AsJson = False,
) -> None:
    """Remove old runs that nothing refers to, and data that no run uses. Champions and tagged runs stay."""
    from vlmpipe.inventory.removal import Policy, pruning_of

    with collector_off():  # from the first run read to the last line shown: all of them live that long
        removal = pruning_of(_read(root), Policy(keep, older_than_days, name, unfinished))
        _remove(removal, dry_run=dry_run, yes=yes, as_json=as_json)


@app.command()
def page(
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default runs.html in the root.", show_default=False)
    ] = None,
    last: Last = NEWEST,
    root: Root = "runs",
    as_json: AsJson = False,
) -> None:
    """Write one page over the newest runs: curves, settings that differ, tags. It needs no server."""
    from vlmpipe.inventory.listing import newest_runs
    from vlmpipe.inventory.page import build_page

    with doing(f"reading the runs in {root}"):
        listing = newest_runs(root, last=last)
    if not listing.runs:
        raise UserError(f"no runs in {listing.root}", expected="runs of this machine", code=ExitCode.NOT_FOUND)
    path = output or listing.root / "runs.html"
    with doing("reading the curves of the runs"), os_errors(f"writing {path}"):
        path.write_text(build_page(listing, path), encoding="utf-8")
    of = f" of {listing.num_runs:,}" if listing.left_out else ""
    number = f"{len(listing.runs):,}{of} run{'' if listing.num_runs == 1 else 's'}"
    if as_json:
        print_json({"page": str(path), "not_listed": listing.left_out})
    else:
        print_lines([f"{path}, {number}"])


def _read(root: str) -> Inventory:
    from vlmpipe.inventory.listing import read_inventory

    with doing(f"reading the runs in {root}"):
        return read_inventory(root)


def _remove(removal: Removal, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Show the removal, ask, and remove."""
    from vlmpipe.cli.runs.removal_lines import freed_text, removal_lines

    content = {**removal.as_json(), "dry_run": dry_run}
    if not as_json:
        print_lines(removal_lines(removal))
    if not (dry_run or removal.is_empty):
        from vlmpipe.planner.spending.approval import terminal_confirm

        ask = None if yes else terminal_confirm()
        if not (yes or ask):
            raise ConfigError(
                "nothing was removed: there is no terminal to ask in", expected="--yes, which removes without asking"
            )
        if ask and not ask(f"Remove {freed_text(removal.size_bytes, removal.not_sized)} for good?"):
            raise UserError("nothing was removed", expected="the answer y", code=ExitCode.INTERRUPTED)
        if stayed := removal.apply(say=to_stderr):
            gone = [
                shared for shared in content["shared"] if shared["uri"] not in {str(data.folder) for data in stayed}
            ]
            content |= {
                "shared": gone,
                "size_bytes": content["size_bytes"] - sum(data.size_bytes or 0 for data in stayed),
                "not_sized": content["not_sized"] - sum(data.size_bytes is None for data in stayed),
            }
    if as_json:
        print_json({**content, "removed": not dry_run})
    elif not removal.is_empty:
        print_lines(
            [f"{'would free' if dry_run else 'freed'} {freed_text(content['size_bytes'], content['not_sized'])}"]
        )
