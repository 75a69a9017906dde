"""Entry point of the `vlmpipe` command: names a missing package in a sentence, before it is imported."""

import sys

from vlmpipe.trainer.extras import install_command


def console() -> None:
    """Run the command line. Exits with 69 where a package that it needs is missing."""
    try:
        from vlmpipe.cli.app import console as run
    except ModuleNotFoundError as error:
        extras = "vlmpipe with pipelines (the command line), trainer and data (runs on this machine)"
        needed = install_command("pipelines,trainer,data")
        _leave(f"the Python package {error.name} is not installed", extras, needed)
    run()


def _leave(found: str, expected: str, fix: str) -> None:
    lines = [f"error: {found}", f"  expected: {expected}", f"  to do:    {fix}"]
    print("\n".join(lines), file=sys.stderr)
    raise SystemExit(69)
