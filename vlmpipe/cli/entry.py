"""Entry point of the `vlmpipe` command: names a missing or shadowed package in a sentence, before it is imported."""

import importlib.util
import sys
from pathlib import Path

from vlmpipe.trainer.extras import install_command


def console() -> None:
    """Run the command line. Exits with 69 where a package that it needs is missing or shadowed."""
    ours = Path(__file__).parents[2]
    for package in ("pipelines", "components", "trainer"):
        found = importlib.util.find_spec(package)
        places = list(found.submodule_search_locations or []) if found else []
        if places and Path(places[0]).parent != ours:
            _leave(
                f"the package {package} is {places[0]}, which is not vlmpipe's",
                f"{ours / package}",
                "uninstall the other distribution, or install vlmpipe into an environment of its own",
            )
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
