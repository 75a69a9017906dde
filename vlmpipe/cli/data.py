"""`vlmpipe data`: look at a run's data as training reads it."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmpipe.cli.arguments import AsJson, Overrides, RunFile, Stage, load_training
from vlmpipe.cli.output import doing, print_json

app = typer.Typer(help="A run's data.", no_args_is_help=True)


@app.callback()
def _data() -> None:
    """A run's data."""


@app.command()
def inspect(
    config: RunFile,
    overrides: Overrides = None,
    first: Annotated[int, typer.Option(min=0, metavar="N", help="Number of the first sample shown, from 0.")] = 0,
    count: Annotated[int, typer.Option(min=1, metavar="N", help="How many samples are shown.")] = 3,
    stage: Stage = "",
    as_json: AsJson = False,
) -> None:
    """Show samples in the chat template, as tokens. Labels, which the loss counts, are in colour."""
    settings = load_training(config, overrides, stage)
    with doing(f"reading samples of {settings.data.source}"):
        from trainer.config.job import JobConfig, RunPaths
        from trainer.data.prepare.inspect import inspect as inspected

        paths = RunPaths(run_id=settings.name, root_uri=settings.root_uri("local"))
        chat, found = inspected(JobConfig.model_validate(settings.to_run_json(paths)), first=first, count=count)
        samples = list(found)
    if as_json:
        print_json(
            {
                "chat_template": chat.template.source,
                "end_tokens": chat.end_tokens,
                "samples": [
                    {
                        "id": one.id,
                        "where": one.where,
                        "rejected": one.rejected,
                        "input_ids": one.encoded.input_ids,
                        "labels": one.encoded.labels,
                        "pieces": [vars(piece) for piece in one.pieces],
                    }
                    for one in samples
                ],
            }
        )
        return
    from vlmpipe.cli.views.tokens import print_samples

    print_samples(samples)
