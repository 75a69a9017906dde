"""`vlmpipe compile` and `publish`: run files become pipelines, in a folder or in a registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpipe import api
from vlmpipe.cli.arguments import AsJson, any_target, load, run_files, service_target
from vlmpipe.cli.output import doing, print_json, print_lines
from vlmpipe.platforms.table import DEFAULT, platform_of
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
    target: Annotated[str, any_target("Where the pipeline is to run.")] = DEFAULT,
    output: Output = Path("build/pipelines"),
) -> None:
    """Compile run files into pipelines. One YAML file each, named <name>.<target>.yaml."""
    with collector_off():
        for _, compiled in _compiled(configs, target, output):
            how = "valid, but no run of it can start:" if compiled.unready else "checked"
            print(f"{compiled.path}: {compiled.steps} steps, {compiled.jobs} jobs, {how}")
            print_lines([f"  {line}" for line in (*compiled.unready, *compiled.unused)])


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
    place, publish_one = platform_of(target).publisher(registry, tag or [])
    every = list(_compiled(configs, target, output))  # so that none is published if one cannot be compiled
    with doing(f"publishing to {place}"):
        done = [publish_one(config, compiled) for config, compiled in every]
    if as_json:
        print_json({"published": [training.as_json() for training in done]})
    else:
        print_lines([line for training in done for line in training.lines()])


def _compiled(configs: list[str], target: str, output: Path) -> Iterator[tuple[RunConfig, Compiled]]:
    files = [Path(text) for text in configs if "=" not in text]
    overrides = [text for text in configs if "=" in text]
    if not files:
        raise ConfigError("no run file given", expected="vlmpipe compile CONFIG... [a.b=c]...")
    loaded = {output / f"{config.name}.{target}.yaml": config for config in (load(file, overrides) for file in files)}
    if len(loaded) < len(files):
        raise ConfigError("two of the run files have the same name", expected="a different `name` in each run file")
    for path, config in loaded.items():
        with doing(f"compiling {config.name} for {target}"):
            compiled = api.compile(config, target, path)
        yield config, compiled
