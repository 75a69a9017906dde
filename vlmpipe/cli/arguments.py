"""Arguments that several commands take, and what the shell completes them with: names of files and folders alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.models import OptionInfo

from vlmpipe import api
from vlmpipe.cli.output import to_stderr
from vlmpipe.platforms.table import DEFAULT, PLATFORMS, platform_of, searching, services
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.platforms.compiled import Template


def target_option(names: Callable[[], Sequence[str]], help: str) -> OptionInfo:
    """--target, whose values are names in the table of platforms, read when the command runs."""

    def parsed(value: str) -> str:
        if value not in names():
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, names()))}.")
        return value

    option: OptionInfo = typer.Option(
        "--target", parser=parsed, metavar=f"<{'|'.join(names())}>", autocompletion=lambda: list(names()), help=help
    )
    return option


def any_target(help: str) -> OptionInfo:
    """--target of a command for every platform."""
    return target_option(lambda: list(PLATFORMS), help)


def service_target(help: str) -> OptionInfo:
    """--target of a command for platforms that runs are submitted to."""
    return target_option(services, help)


def search_target(help: str) -> OptionInfo:
    """--target of a command for platforms that run trials of a search."""
    return target_option(searching, help)


def run_files(incomplete: str) -> list[str]:
    """YAML files in the folder typed so far and one level below."""
    folder, _, name = incomplete.rpartition("/")
    prefix = f"{folder}/" if "/" in incomplete else ""
    pattern = (f"{name}*.y*ml", f"{name}*/*.y*ml")
    paths = [
        path.relative_to(folder or (prefix or ".")) for entry in pattern for path in Path(prefix or ".").glob(entry)
    ]
    return sorted(f"{prefix}{path}" for path in paths)


def run_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Runs under --root and those submitted from this folder, the newest first."""
    from vlmpipe.platforms.short_names import LAST
    from vlmpipe.runs.submitted import SUBMITTED

    runs = Path(context.params.get("root") or "runs", "runs")
    paths = [*runs.glob(f"{incomplete}*/"), *SUBMITTED.glob(f"{incomplete}*.json")]
    short = [LAST] if LAST.startswith(incomplete) else []
    return short + [path.stem for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)]


RunFile = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="The run file, for example configs/digits.yaml.", autocompletion=run_files),
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="The run file, or https://REGION-kfp.pkg.dev/PROJECT/REPOSITORY/NAME/TAG of a published one.",
        autocompletion=run_files,
    ),
]
OptionalSource = Annotated[
    str,
    typer.Argument(
        metavar="[CONFIG]",
        help="The run file, or https://REGION-kfp.pkg.dev/PROJECT/REPOSITORY/NAME/TAG of a published one.",
        autocompletion=run_files,
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="a.b=c", help="Fields to override, for example train.epochs=2.", show_default=False),
]
Stage = Annotated[
    str,
    typer.Option("--stage", metavar="NAME", help="Of several stages this one; default the last.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
FailOnReject = Annotated[
    bool, typer.Option("--fail-on-reject", help="End with exit code 76 where the gate rejects the model.")
]


def load(config: Path, overrides: Sequence[str] | None) -> RunConfig:
    """The checked run file with overrides. Raises RunFileError with every problem in it."""
    from vlmpipe.config.yaml_loader import shipped

    if shipped(config):
        to_stderr(f"note: {config} is the copy that comes with vlmpipe; vlmpipe init writes one to change")
    return api.load(config, *(overrides or ()))


def load_training(config: Path, overrides: Sequence[str] | None, stage: str) -> RunConfig:
    """The run file of one training: of several stages the named one, by default the last. Raises ConfigError."""
    runs = load(config, overrides).stage_runs()
    if stage and stage not in runs:
        known = ", ".join(filter(None, runs))
        expected = f"one of {known}" if known else "no --stage: this run file has no stages"
        raise ConfigError(f"--stage is {stage}", expected=expected)
    return runs[stage] if stage else list(runs.values())[-1]


def load_source(
    source: str, overrides: Sequence[str] | None, target: str = DEFAULT
) -> tuple[RunConfig, Template | None]:
    """The run file, or that of a published pipeline with the pipeline itself.

    Raises UserError for a pipeline that cannot be had, ConfigError for overrides of one: it runs as it was published.
    """
    if not source.startswith(("https://", "http://")):
        return load(Path(source), overrides), None
    if overrides:
        raise ConfigError(
            f"{' '.join(overrides)} next to a published pipeline",
            expected="no overrides: it runs as it was published",
            fix="publish a changed run file; or start it in the console, which shows the pipeline's parameters",
        )
    from vlmpipe.platforms.compiled import FOLDER

    template = platform_of(target).fetch(source, FOLDER)
    return template.config, template
