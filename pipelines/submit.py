"""`vlmpipe submit`: start a run of a run file on a platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.platforms.base import Order
from vlmpipe.platforms.table import DEFAULT, platform_of

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.platforms.base import Submitted
    from vlmpipe.platforms.compiled import Compiled, Template


def submit_run(
    config: RunConfig,
    template: Template | None = None,
    *,
    target: str = DEFAULT,
    source: Sequence[str],
    run_id: str,
    force: bool,
    yes: bool,
    dry_run: bool,
    ask: Callable[[str], bool] | None,
) -> Submitted:
    """Start a run of `config` on the platform `target`. Arguments as the fields of `Order`.

    Raises UserError where the run was not started, or where that is not known, which the message says.
    """
    order = Order(config, template, compiler(target), source, run_id, force, yes, dry_run, ask)
    return platform_of(target).submit(order)


def compiler(target: str) -> Callable[[RunConfig, Path], Compiled]:
    """A function that compiles a run file for `target` into a file."""
    return lambda config, path: compile_pipeline(config, target, path)
