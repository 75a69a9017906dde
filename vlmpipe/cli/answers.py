"""Commands that let a run's model answer: about one image, over many at once, or behind a server."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from vlmpipe.cli.arguments import AsJson, run_ids
from vlmpipe.cli.output import doing, print_error, print_json, print_lines, print_text, to_stderr
from vlmpipe.cli.runs.options import Root
from vlmpipe.trainer.errors import ConfigError, DataError, os_errors
from vlmpipe.trainer.printable import one_line

if TYPE_CHECKING:
    from vlmpipe.trainer.config.job import JobConfig

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
        str,
        typer.Argument(
            help="An image, a folder of images, a table (.jsonl, .csv, .parquet) with image or file_name and question, "
            "or a source as data.source takes it."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where answers go: .jsonl, .csv or .parquet. Without it they are printed.",
            show_default=False,
        ),
    ] = None,
    question: Annotated[
        str, typer.Option(help="What to ask about each image that has no question of its own.", show_default=False)
    ] = "",
    batch: Annotated[int, typer.Option(min=0, help="Questions at once; 0 takes evaluate.batch_questions.")] = 0,
    root: Root = "runs",
    as_json: AsJson = False,
) -> None:
    """Answer questions about images. One, a folder, a table or a source; as the evaluation asks, and as fast."""
    with doing(f"asking {run}"):
        from vlmpipe.trainer.evaluation.prediction.predict import Predictor
        from vlmpipe.trainer.evaluation.prediction.predict import predict as predict_all
        from vlmpipe.trainer.evaluation.prediction.questions import read_questions

        job = _job_of(run, root)
        questions = read_questions(source, question, job.data)
        if output:
            predicted = predict_all(job, questions, output, batch=batch)
        else:
            predictor = Predictor.load(job)
    if output:
        rate = (predicted.answered + predicted.failed - predicted.continued) / max(predicted.answer_s, 1e-9)
        if as_json:
            print_json({"output": str(output), "questions_per_s": rate, **vars(predicted)})
            return
        failed = f", {predicted.failed:,} images could not be asked about (column error)" if predicted.failed else ""
        continued = f", {predicted.continued:,} of them from before it was stopped" if predicted.continued else ""
        if predicted.not_taken_over:
            to_stderr(f"note: {predicted.not_taken_over}")
        print_lines([f"{predicted.answered:,} answers in {output}{continued}, {rate:,.1f} a second{failed}"])
        return
    batches = predictor.answer(questions, batch=batch)
    if as_json:
        print_json({"answers": [asdict(line) for rows in batches for line in rows]})
        return
    asks_one = len({question.question for question in questions}) == 1
    for line in (line for rows in batches for line in rows):
        asked = "" if asks_one else f"{one_line(line.question)}  "
        text = line.prediction if not line.error else f"not asked: {line.error}"
        print_text(f"{one_line(line.image)}  {asked}{one_line(text)}")


def ask(
    run: RunName,
    image: Annotated[Path, typer.Argument(help="The image to ask about.")],
    question: Annotated[
        str,
        typer.Argument(
            metavar="[QUESTION]", help="What to ask; without it, questions are read line by line.", show_default=False
        ),
    ] = "",
    root: Root = "runs",
    as_json: AsJson = False,
) -> None:
    """Ask a run's model about one image. One question, or one after the other; each is asked by itself."""
    with doing(f"loading the model of {run}"):
        from vlmpipe.trainer.evaluation.prediction.answer_file import ToAnswer
        from vlmpipe.trainer.evaluation.prediction.predict import Predictor

        with os_errors(f"reading {image}"):
            image.open("rb").close()
        predictor = Predictor.load(_job_of(run, root))
    answers = []
    alone = "Each question is asked by itself: the model sees no earlier one (vlmpipe chat shows them)."
    for text in [question] if question else _asked_lines(f"{alone} An empty line or Ctrl-D ends."):
        try:
            (rows,) = predictor.answer([ToAnswer(image, text)])
        except DataError as error:
            if question or not sys.stdin.isatty():
                raise
            print_error(error, as_json=False)
            continue
        answers += [asdict(line) for line in rows]
        if not as_json:
            print_text(one_line(rows[0].prediction))
    if as_json:
        print_json({"answers": answers})


def chat(
    run: RunName,
    image: Annotated[Path, typer.Argument(help="The image to talk about; it is shown where the terminal can.")],
    root: Root = "runs",
) -> None:
    """Talk with a run's model about one image. Each question is asked after the earlier ones and their answers."""
    from vlmpipe.cli.views.terminal_image import show_image

    with os_errors(f"reading {image}"):
        image.open("rb").close()
    show_image(image)
    with doing(f"loading the model of {run}"):
        from vlmpipe.serving.conversation import Conversation
        from vlmpipe.trainer.evaluation.prediction.predict import Predictor

        conversation = Conversation(Predictor.load(_job_of(run, root)), image)
    for text in _asked_lines("/new forgets what was said. An empty line or Ctrl-D ends."):
        if text == "/new":
            conversation.turns = []
            continue
        try:
            reply = conversation.ask(text)
        except DataError as error:
            if not sys.stdin.isatty():
                raise
            print_error(error, as_json=False)
            continue
        if reply.forgotten:
            to_stderr(f"note: the oldest {reply.forgotten} questions are forgotten: the model takes no more tokens")
        print_text(one_line(reply.text))


def _asked_lines(hint: str) -> Iterator[str]:
    """Questions from standard input, until it ends or a terminal's line is empty."""
    asks = sys.stdin.isatty()
    if asks:
        to_stderr(hint)
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or (asks and not line.strip()):
            return
        if line.strip():
            yield line.strip()


def _job_of(run: str, root: str) -> JobConfig:
    from vlmpipe.comparison.sides import run_uri_named
    from vlmpipe.trainer.config.job import JobConfig
    from vlmpipe.trainer.storage.base import join_uri

    return JobConfig.load(join_uri(run_uri_named(run, root), "run.json"))


def serve(
    run: RunName,
    check: Annotated[
        int, typer.Option(metavar="N", min=0, help="Ask N validation questions, compare the answers, and end.")
    ] = 0,
    min_agreement: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="With --check: share of answers that must be the evaluation's.")
    ] = 1.0,
    url: Annotated[
        str, typer.Option(metavar="URL", help="With --check: a server that runs already; its chat completions.")
    ] = "",
    model: Annotated[str, typer.Option(help="With --url: the model's name on that server.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the server; 0 takes a free one.")] = 8000,
    quantized: Annotated[
        str, typer.Option(metavar="FORMAT", help="Serve this quantized export of the run, int4 or fp8, in its place.")
    ] = "",
    root: Root = "runs",
    as_json: AsJson = False,
) -> None:
    """Serve a run's model, or check its server. By transformers serve; answers are held to the evaluation's."""
    if url and not check:
        raise ConfigError("--url is given without --check", expected="vlmpipe serve RUN --check N --url URL")
    if url and quantized:
        raise ConfigError("--quantized is given with --url, whose server has its model", expected="one of both")
    from vlmpipe.comparison.sides import run_uri_named
    from vlmpipe.platforms.jobs.signals import handling
    from vlmpipe.serving.agreement import measure_agreement, require_agreement
    from vlmpipe.serving.openai import CHAT_PATH, ChatServer
    from vlmpipe.serving.questions import validation_questions
    from vlmpipe.trainer.config.checkpoint import QuantizedFormat
    from vlmpipe.trainer.serving.local_server import serving

    if quantized and quantized not in get_args(QuantizedFormat):
        raise ConfigError(f"--quantized is {quantized}", expected=" or ".join(get_args(QuantizedFormat)))

    run_uri = run_uri_named(run, root)
    if not check:
        with handling([signal.SIGTERM], _interrupt), contextlib.ExitStack() as stack:
            with doing(f"starting {run}"):
                server = stack.enter_context(serving(run_uri, port=port, quantized=quantized))
            with contextlib.suppress(KeyboardInterrupt):
                to_stderr(f"{run} answers at {server.url}{CHAT_PATH} as model {server.model}; Ctrl-C ends it")
                server.wait()
        return
    with doing(f"asking {check} questions of {run}"):
        questions = validation_questions(run_uri, check)
        if url:
            agreement = measure_agreement(questions, ChatServer(url, model).ask)
        else:
            with serving(run_uri, quantized=quantized) as server:
                agreement = measure_agreement(questions, ChatServer(f"{server.url}{CHAT_PATH}", server.model).ask)
    if as_json:
        print_json({"ok": agreement.share >= min_agreement, **agreement.as_json()})
    else:
        print_lines([agreement.sentence()])
    require_agreement(agreement, min_agreement)


def _interrupt(*_: object) -> None:
    """SIGTERM stops the server as Ctrl-C does."""
    raise KeyboardInterrupt


ALL = (ask, chat, predict, serve)
