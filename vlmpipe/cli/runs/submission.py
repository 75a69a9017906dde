"""Submit a run to a service, and print the submission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmpipe.cli.output import doing, print_json, print_lines
from vlmpipe.platforms.table import DEFAULT, platform_of

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.platforms.base import Run
    from vlmpipe.platforms.compiled import Template


@dataclass(frozen=True)
class SubmitOptions:
    """Options of a submission. run_id: as typed; empty for a new run."""

    target: str
    run_id: str
    yes: bool
    dry_run: bool
    detach: bool
    as_json: bool
    force: bool = False


def submit_and_print(
    name: str,
    load: Callable[[], tuple[RunConfig, Template | None]],
    source: Sequence[str],
    options: SubmitOptions,
) -> Run | None:
    """Submit what `load` returns, and print it; as JSON only where nothing is to be watched.

    Args:
        name: of the run file, for the notice of what takes long.
        source: run file and overrides, by which the run is continued.

    Returns the run to watch; None where nothing was sent, or with --detach.
    """
    target = options.target
    with doing(f"planning, compiling and submitting {name} to {platform_of(target).title}"):
        from vlmpipe.pipelines.submit import submit_run
        from vlmpipe.planner.spending.approval import terminal_confirm
        from vlmpipe.platforms.short_names import submitted_to_continue

        config, template = load()
        submitted = submit_run(
            config,
            template,
            target=target,
            source=[*source, *([] if target == DEFAULT else ["--target", target])],
            run_id=submitted_to_continue(options.run_id, config, target),
            force=options.force,
            yes=options.yes,
            dry_run=options.dry_run,
            ask=terminal_confirm(),
        )
    watched = None if options.detach else submitted.started
    if not options.as_json:
        print_lines(submitted.lines())
    elif not watched:
        print_json(submitted.as_json())
    return watched
