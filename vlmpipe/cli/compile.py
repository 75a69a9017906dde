"""`vlmpipe compile` and `publish`: run files become pipelines, in a folder or in a registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpipe import api
from vlmpipe.cli.arguments import AsJson, any_target, load, run_files, service_target
from vlmpipe.cli.output import doing, print_json, print_lines
from vlmpipe.platforms.table import DEFAULT, here, platform_of
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.gc_control import collector_off

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.platforms.compiled import Compiled

Configs = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG", help="Run files, and fields to override in all.", autocompletion=run_files),
]
Output = Annotated[Path, typer.Option(help="Folder to write the pipelines to.")]


def compile_(
    configs: Configs,
    target: Annotated[
        str | None,
        any_target(
            f"Where the pipelines are to run. Without it: {DEFAULT}, and this machine for run files without an image, "
            "which jobs elsewhere need."
        ),
    ] = None,
    output: Output = Path("build/pipelines"),
) -> None:
    """Compile run files into pipelines. One YAML file each, named <name>.<target>.yaml."""
    with collector_off():
        for config, compiled in _compiled(configs, target, output):
            how = "valid, but no run of it can start:" if compiled.unready else "checked"
            print(f"{compiled.path}: {compiled.steps} steps, {compiled.jobs} jobs, {how}")
            for problem in (*compiled.unready, *compiled.unused):
                print_lines([f"  {problem}"])
            if target is None and not _names_an_image(config):
                print_lines([f"  for this machine alone; for --target {DEFAULT} it also needs {_missing(config)}"])


def publish(
    configs: Configs,
    registry: Annotated[
        str,
        typer.Option(
            envvar="VERTEX_TEMPLATE_REGISTRY",
            metavar="ADDRESS",
            help="Repository of Artifact Registry, format KFP: https://REGION-kfp.pkg.dev/PROJECT/REPOSITORY.",
            show_default=False,
        ),
    ] = "",
    tag: Annotated[
        list[str] | None,
        typer.Option(metavar="TAG", help="An additional tag, next to latest and vlmpipe's version. Repeatable."),
    ] = None,
    target: Annotated[str, service_target("Where the templates are.")] = DEFAULT,
    output: Output = Path("build/pipelines"),
    as_json: AsJson = False,
) -> None:
    """Compile run files and publish them as templates. The console, submit and schedule start runs of them."""
    platform = platform_of(target)
    for config in _loaded(configs):
        platform.check(config)  # before anything asks for a login
    place, publish_one = platform.publisher(registry, tag or [])
    every = list(_compiled(configs, target, output))  # so that none is published if one cannot be compiled
    with doing(f"publishing to {place}"):
        done = [publish_one(config, compiled) for config, compiled in every]
    if as_json:
        print_json({"published": [training.as_json() for training in done]})
    else:
        print_lines([line for training in done for line in training.lines()])


def _names_an_image(config: RunConfig) -> bool:
    return bool(config.cluster.image_uri or config.gcp.pipeline_image)


def _missing(config: RunConfig) -> str:
    return ", ".join(problem.field for problem in platform_of(DEFAULT).missing(config) if problem.is_missing)


def _compiled(configs: list[str], target: str | None, output: Path) -> Iterator[tuple[RunConfig, Compiled]]:
    for config in _loaded(configs):
        place = target or (DEFAULT if _names_an_image(config) else here().name)
        with doing(f"compiling {config.name} for {place}"):
            compiled = api.compile(config, place, output / f"{config.name}.{place}.yaml")
        yield config, compiled


def _loaded(configs: list[str]) -> list[RunConfig]:
    files = [Path(text) for text in configs if "=" not in text]
    overrides = [text for text in configs if "=" in text]
    if not files:
        raise ConfigError("no run file given", expected="vlmpipe compile CONFIG... [a.b=c]...")
    loaded = [load(file, overrides) for file in files]
    if len({config.name for config in loaded}) < len(files):
        raise ConfigError("two of the run files have the same name", expected="a different `name` in each run file")
    return loaded
