"""Commands that let a run's model answer: over many images at once, or behind a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmpipe.cli.arguments import AsJson, run_ids
from vlmpipe.cli.output import doing, print_error, print_json, print_lines, to_stderr
from vlmpipe.cli.runs import Root
from vlmpipe.trainer.errors import ConfigError, UserError

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run: its id, @last, folder or gs:// address, or MODEL@ALIAS or MODEL@VERSION of the registry.",
        autocompletion=run_ids,
    ),
]


def predict(
    run: RunName,
    source: Annotated[
        Path, typer.Argument(help="A folder of images, or a table (.jsonl, .csv, .parquet) of image and question.")
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where answers go: .jsonl or .parquet.")],
    question: Annotated[
        str, typer.Option(help="What to ask about each image that has no question of its own.", show_default=False)
    ] = "",
    batch: Annotated[int, typer.Option(min=0, help="Questions at once; 0 takes evaluate.batch_questions.")] = 0,
    root: Root = "runs",
    as_json: AsJson = False,
) -> None:
    """Answer questions about many images. Of a folder or table, as the evaluation asks, and as fast."""
    with doing(f"asking {run}"):
        from vlmpipe.compare.sides import run_uri_named
        from vlmpipe.trainer.config.job import JobConfig
        from vlmpipe.trainer.evaluation.predict import predict as predict_all
        from vlmpipe.trainer.evaluation.predict import read_questions
        from vlmpipe.trainer.storage.base import join_uri

        questions = read_questions(source, question)
        job = JobConfig.load(join_uri(run_uri_named(run, root), "run.json"))
        found = predict_all(job, questions, output, batch=batch)
    rate = found.answered / found.answer_s
    if as_json:
        print_json({"output": str(output), "questions_per_s": rate, **vars(found)})
        return
    failed = f", {found.failed:,} images could not be asked about (column error)" if found.failed else ""
    print_lines([f"{found.answered:,} answers in {output}, {rate:,.1f} a second{failed}"])


def serve(
    run: RunName,
    check: Annotated[
        int, typer.Option(metavar="N", min=0, help="Ask N held-out questions, compare the answers, and end.")
    ] = 0,
    min_agreement: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="With --check: share of answers that must be the evaluation's.")
    ] = 1.0,
    url: Annotated[
        str, typer.Option(metavar="URL", help="With --check: a server that runs already; its chat completions.")
    ] = "",
    model: Annotated[str, typer.Option(help="With --url: the model's name on that server.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the server; 0 takes a free one.")] = 8000,
    root: Root = "runs",
    as_json: AsJson = False,
) -> None:
    """Serve a run's model, or check its server. By transformers serve; answers are held to the evaluation's."""
    if url and not check:
        raise ConfigError("--url is given without --check", expected="vlmpipe serve RUN --check N --url URL")
    from vlmpipe.compare.sides import run_uri_named
    from vlmpipe.serving.agreement import measure_agreement, require_agreement
    from vlmpipe.serving.openai import CHAT_PATH, ChatServer
    from vlmpipe.serving.questions import held_out_questions
    from vlmpipe.trainer.serving.local_server import serving

    run_uri = run_uri_named(run, root)
    if not check:
        with doing(f"starting {run}"):
            started = serving(run_uri, port=port)
        with started as server:
            to_stderr(f"{run} answers at {server.url}{CHAT_PATH} as model {server.model}; Ctrl-C ends it")
            server.wait()
        return
    with doing(f"asking {check} questions of {run}"):
        questions = held_out_questions(run_uri, check)
        if url:
            found = measure_agreement(questions, ChatServer(url, model).ask)
        else:
            with serving(run_uri) as server:
                found = measure_agreement(questions, ChatServer(f"{server.url}{CHAT_PATH}", server.model).ask)
    if not as_json:
        print_lines([found.sentence()])
        require_agreement(found, min_agreement)
        return
    print_json({"ok": found.share >= min_agreement, **found.as_json()})
    try:
        require_agreement(found, min_agreement)
    except UserError as error:  # on stdout is one JSON document, which says it already
        print_error(error, as_json=False)
        raise typer.Exit(int(error.code)) from None


ALL = (predict, serve)
