"""`vlmpipe curve`: how many samples a score needs, from trainings on nested shares of those that there are."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpipe.cli.arguments import AsJson, Overrides, RunFile, any_target, load
from vlmpipe.cli.output import print_json, print_lines, to_stderr
from vlmpipe.cli.runs.options import Plain
from vlmpipe.cli.runs.submission import SubmitOptions, submit_and_print
from vlmpipe.cli.runs.watching import follow
from vlmpipe.platforms.table import DEFAULT, platform_of
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.platforms.base import Status

SHARES = "5,10,20,40,100"  # percent
SUFFIX = "-curve"
LONGEST_NAME = 63
ONE_SCORE = (  # a curve compares answers to the validation questions, and nothing is gated or registered
    "evaluate.controls=[]",
    "evaluate.benchmarks=[]",
    "evaluate.baseline=off",
    "evaluate.retention.probe=off",
    "gate=none",
)


def curve(
    config: RunFile,
    overrides: Overrides = None,
    shares: Annotated[
        str, typer.Option(metavar="PERCENT,...", help="Shares of the training samples, of which the largest is 100.")
    ] = SHARES,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each share, each with a subset of its own.")] = 3,
    goal: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Score that is asked about, such as 0.95.", show_default=True)
    ] = 0.95,
    metric: Annotated[str, typer.Option(help="Score: exact_match, vqa_accuracy or anls.")] = "exact_match",
    target: Annotated[str, any_target("Where to train.")] = "local",
    run_id: Annotated[
        str, typer.Option(help="Name of the run, or of one to continue; default <name>-curve-<date>-<time>.")
    ] = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="On this machine, start a new run even if the last one can be continued.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, whatever it costs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, and send nothing.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Leave once it is started on a service.")] = False,
    plain: Plain = False,
    as_json: AsJson = False,
) -> None:
    """Say how many samples a score needs.

    Laws are fitted to trainings on nested shares of the training samples: a sweep over data.train_share on one
    preparation. A curve that was stopped here is continued by the same command.
    """
    from vlmpipe.config.run_config import derived

    is_here = platform_of(target).is_here
    options = {"--dry-run": dry_run, "--detach": detach, "--yes": yes} if is_here else {"--fresh": fresh}
    if useless := [name for name, is_given in options.items() if is_given]:
        where = "local, where nothing is sent" if is_here else f"{target}; --run-id continues a run there"
        raise ConfigError(f"{', '.join(useless)} is given with --target {where}", fix="leave it out")
    settings = _curve_of(config, overrides or [], _shares(shares), seeds, goal, metric, is_here=is_here)
    asked = ["--shares", shares, "--seeds", str(seeds), "--goal", str(goal), "--metric", metric]
    settings = derived(settings, "curve", [str(config), *(overrides or []), *asked])
    ended = (
        _run(settings, run_id, fresh=fresh, plain=plain, as_json=as_json)
        if is_here
        else _submit(settings, SubmitOptions(target, run_id, yes, dry_run, detach, as_json), plain=plain)
    )
    if ended is None:
        return
    if as_json:
        print_json(ended.as_json())
    else:
        print_lines(["", *ended.lines()])
    raise typer.Exit(ended.exit_code or 0)


def _shares(text: str) -> list[float]:
    """The shares of a text such as 5,10,100, ascending."""
    expected = "percentages above 0 up to 100, such as 5,10,20,40,100"
    try:
        percentages = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"--shares is {text!r}", expected=expected) from None
    if not all(math.isfinite(share) and 0 < share <= 100 for share in percentages):
        raise ConfigError(f"--shares is {text!r}", expected=expected)
    if len(percentages) < 3 or percentages[-1] != 100:
        raise ConfigError(f"--shares is {text!r}", expected="at least three different shares, 100 among them")
    return [share / 100 for share in percentages]


def _curve_of(
    path: Path, overrides: list[str], shares: list[float], seeds: int, goal: float, metric: str, *, is_here: bool
) -> RunConfig:
    """The run file with a sweep over the shares. Raises ConfigError for one that has a sweep, stages or a share."""
    fixed = [*ONE_SCORE, *(["cluster.replica_count=1"] if is_here else [])]
    plain = load(path, _replaced(overrides, fixed))
    for field in ("sweep", "stages"):
        if getattr(plain, field):
            raise ConfigError(f"{path} has {field}", expected="a run file of one training", fix=f"leave {field} out")
    if plain.data.train_share < 1:
        share = f"data.train_share is {plain.data.train_share:g}"
        raise ConfigError(share, expected="1: vlmpipe curve sets the shares itself", fix="leave it out")
    several_nodes = plain.cluster.replica_count > 1
    trainings = len(shares) * seeds
    sweep = {
        "grid": {"data.train_share": shares},
        "starts": seeds,
        "goal": goal,
        "metric": metric,
        "parallelism": 1 if is_here else 2,
        "trainings_per_job": trainings if is_here else 1 if several_nodes else -(-trainings // 2),
    }
    added = [f"name={plain.name[: LONGEST_NAME - len(SUFFIX)].rstrip('-')}{SUFFIX}", f"sweep={json.dumps(sweep)}"]
    _note_ignored(path, overrides, fixed)
    return load(path, _replaced(overrides, [*fixed, *added]))


def _replaced(overrides: list[str], added: list[str]) -> list[str]:
    """The overrides with those that are added; of both for one field, or a field below it, the added ones."""
    names = {override.partition("=")[0] for override in added}
    return [*(override for override in overrides if not _sets(override, names)), *added]


def _sets(override: str, names: Collection[str]) -> bool:
    field = override.partition("=")[0].strip()
    return any(f"{field}.".startswith(f"{name}.") for name in names)


def _note_ignored(path: Path, overrides: list[str], fixed: list[str]) -> None:
    """Say what of the command line and of the cluster a curve does not use."""
    from vlmpipe.config.overrides import parse_overrides
    from vlmpipe.config.sections.stages import with_overrides
    from vlmpipe.config.yaml_loader import read_run_file

    names = {override.partition("=")[0] for override in ONE_SCORE}
    if unused := [override for override in overrides if _sets(override, names)]:
        to_stderr(f"note: a curve asks the validation questions alone and has no gate; not used: {' '.join(unused)}")
    if not any(text.startswith("cluster.") for text in fixed):
        return
    cluster = with_overrides(read_run_file(path), parse_overrides(overrides)).get("cluster")
    nodes = cluster.get("replica_count", 1) if isinstance(cluster, dict) else 1
    if nodes != 1:
        to_stderr(f"note: each training runs on one node here; the {nodes} of cluster.replica_count change no result")


def _run(settings: RunConfig, run_id: str, *, fresh: bool, plain: bool, as_json: bool) -> Status:
    from vlmpipe import api
    from vlmpipe.runs.live_view import view_for

    say = to_stderr if as_json else print
    view = view_for(plain=plain or as_json, say=say)
    return api.run(settings, run_id=run_id, fresh=fresh, view=view, say=say, raise_on_failure=False)


def _submit(settings: RunConfig, options: SubmitOptions, *, plain: bool) -> Status | None:
    """Submit and watch. Returns None where it is not watched."""
    # Unlike `vlmpipe submit`, which is to continue a run there, a curve is trained here where no target is given.
    source = [*settings.source, *(["--target", DEFAULT] if options.target == DEFAULT else [])]
    watching = submit_and_print(settings.name, lambda: (settings, None), source, options)
    if not watching:
        return None
    say = to_stderr if options.as_json else print
    return follow(watching.argument, watching.reader(), on_service=True, plain=plain or options.as_json, say=say)
