"""`vlmpipe compile` and `publish`: run files become pipelines, in a folder or in a registry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpipe import api
from vlmpipe.cli.arguments import AsJson, ServiceTarget, TargetOption, load, run_files
from vlmpipe.cli.output import doing, print_json, print_lines
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.gc_control import collector_off

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.pipelines.compile import Compiled
    from vlmpipe.pipelines.templates.kubeflow import PublishedToKubeflow
    from vlmpipe.pipelines.templates.publish import Published

Configs = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG", help="Run files, and fields to override in all.", autocompletion=run_files),
]
Output = Annotated[Path, typer.Option(help="Folder to write the pipelines to.")]


def compile_(
    configs: Configs,
    target: Annotated[TargetOption, typer.Option(help="Where the pipeline is to run.")] = TargetOption.vertex,
    output: Output = Path("build/pipelines"),
) -> None:
    """Compile run files into pipelines. One YAML file each, named <name>.<target>.yaml."""
    with collector_off():
        for _, compiled in _compiled(configs, target, output):
            how = "valid, but no run of it can start:" if compiled.unready else "checked"
            print(f"{compiled.path}: {compiled.steps} steps, {compiled.jobs} jobs, {how}")
            print_lines([f"  {one}" for one in (*compiled.unready, *compiled.unused)])


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
    target: Annotated[ServiceTarget, typer.Option(help="Where the templates are.")] = ServiceTarget.vertex,
    output: Output = Path("build/pipelines"),
    as_json: AsJson = False,
) -> None:
    """Compile run files and publish them as templates. The console, submit and schedule start runs of them."""
    done: Sequence[Published | PublishedToKubeflow]
    if target == ServiceTarget.kubeflow:
        if tag:
            raise ConfigError(
                "--tag is given with --target kubeflow", expected="none: versions there have their fingerprint as name"
            )
        done = _published_to_kubeflow(configs, output)
    else:
        done = _published(configs, registry, tag or [], output)
    if as_json:
        print_json({"published": [one.as_json() for one in done]})
    else:
        print_lines([line for one in done for line in one.lines()])


def _published(configs: list[str], registry: str, tags: list[str], output: Path) -> list[Published]:
    from vlmpipe.pipelines.templates.artifact_registry import Registry
    from vlmpipe.pipelines.templates.publish import all_tags
    from vlmpipe.pipelines.templates.publish import publish as publish_one

    all_tags(tags)  # before anything is compiled
    there = Registry(registry)
    every = list(_compiled(configs, TargetOption.vertex, output))  # so that none is published if one cannot be compiled
    with doing(f"publishing to {registry}"):
        return [publish_one(there, compiled, tags) for _, compiled in every]


def _published_to_kubeflow(configs: list[str], output: Path) -> list[PublishedToKubeflow]:
    from vlmpipe.pipelines.submit_kubeflow import endpoint_of
    from vlmpipe.pipelines.templates.kubeflow import publish_to_kubeflow
    from vlmpipe.platforms.kubeflow.runs.client import KubeflowApi

    every = list(_compiled(configs, TargetOption.kubeflow, output))
    with doing("publishing to Kubeflow"):
        return [
            publish_to_kubeflow(KubeflowApi(endpoint_of(config), config.kubeflow.namespace), compiled)
            for config, compiled in every
        ]


def _compiled(configs: list[str], target: TargetOption, output: Path) -> Iterator[tuple[RunConfig, Compiled]]:
    files = [Path(text) for text in configs if "=" not in text]
    overrides = [text for text in configs if "=" in text]
    if not files:
        raise ConfigError("no run file given", expected="vlmpipe compile CONFIG... [a.b=c]...")
    loaded = {
        output / f"{config.name}.{target.value}.yaml": config for config in (load(file, overrides) for file in files)
    }
    if len(loaded) < len(files):
        raise ConfigError("two of the run files have the same name", expected="a different `name` in each run file")
    for path, config in loaded.items():
        with doing(f"compiling {config.name} for {target.value}"):
            compiled = api.compile(config, target.value, path)
        yield config, compiled
