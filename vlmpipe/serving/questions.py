"""validation questions of an evaluated run as requests to an OpenAI-compatible server.

The server writes the prompt by the model's own chat template. A request is therefore formed so that the template gives
the very text that evaluation asked: marks of images become parts of the message, where the template puts them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.chat.encode import SETTINGS, asked_question
from vlmpipe.trainer.data.chat.messages import content_parts
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.data.tokenize import FOLDER
from vlmpipe.trainer.errors import ConfigError, DataError
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_lines

PREDICTIONS = "predictions.jsonl"
Chat = list[dict[str, Any]]  # messages of the OpenAI API


@dataclass(frozen=True)
class ValidationQuestion:
    """A question with its images, and what evaluation got for an answer.

    finish_reason: why that ends, "stop" or "length"; empty where the evaluation did not record it.
    """

    id: str
    turn: int
    messages: Chat
    max_new_tokens: int
    evaluated: str
    finish_reason: str = ""


def validation_questions(run_uri: str, count: int) -> list[ValidationQuestion]:
    """`count` evenly spaced questions of those that the run's evaluation asked, or all if there are fewer.

    Raises ConfigError for a run that was not evaluated here.
    """
    store = open_storage(run_uri)
    for name, step in (("run.json", "resolve-run"), (DataPointers.FILE, DataPointers.STEP), (PREDICTIONS, "evaluate")):
        if store.stat(name) is None:
            raise ConfigError(
                f"no {store.uri(name)}, which the step {step} writes",
                expected="an evaluated run, whose answers a server's can be compared with",
                fix="let the run come to its end; runs with an evaluate_command leave no answers",
            )
    job = JobConfig.read(store)
    pointers = DataPointers.read(store)
    predictions = read_lines(store, PREDICTIONS)
    count = min(count, len(predictions))
    chosen = [predictions[number * len(predictions) // count] for number in range(count)]
    prepared = open_prepared(pointers.prepared_uri)
    as_text = bool(json.loads(prepared.read(f"{FOLDER}/{SETTINGS}"))["as_text"])
    split, shards = Index.load(pointers.prepared_uri).split("eval"), ShardReader.open(prepared)
    if split.has_videos:
        raise ConfigError(
            "the run's data has videos that are not images (data.video native)",
            expected="validation questions about images, which requests can hold",
            fix="compare answers of a run with data.video: frames",
        )
    asked = []
    for line in chosen:
        number = split.number(line["id"])
        if number is None:
            raise DataError(
                f"{pointers.prepared_uri} has no sample {line['id']}, which the run was evaluated on",
                expected="the prepared data of the run's evaluation",
                fix="evaluate the run again",
            )
        place = split.sample_location(number)
        turns, images = shards.turns(place), shards.images(place)
        earlier = turns[: line["turn"]] if job.evaluate.earlier_turns == "reference" else ()
        if earlier:
            images = images[: sum(turn.question.count(IMAGE_TOKEN) for turn in turns[: line["turn"] + 1])]
        messages = chat_messages(line["question"], turns[0].system, images, as_text=as_text, earlier=earlier)
        most, finish = job.evaluate.max_new_tokens, line.get("finish_reason", "")
        asked.append(ValidationQuestion(line["id"], line["turn"], messages, most, line["prediction"], finish))
    return asked


def chat_messages(
    question: str, system: str, images: Sequence[bytes], *, as_text: bool, earlier: Sequence[Turn] = ()
) -> Chat:
    """The messages that ask this, after earlier turns with their answers.

    as_text: the prompt is the question as it is written, line ends included.
    """
    left = iter(images)
    messages: Chat = [{"role": "system", "content": system}] if system else []
    for turn in earlier:
        messages.append({"role": "user", "content": _content(turn.question, left, as_text=as_text)})
        messages.append({"role": "assistant", "content": turn.answer})
    text = question if earlier else asked_question(question, len(images))
    return [*messages, {"role": "user", "content": _content(text, left, as_text=as_text)}]


def _content(text: str, images: Iterator[bytes], *, as_text: bool) -> list[dict[str, object]]:
    parts = _verbatim_parts(text) if as_text else content_parts(text)
    return [
        {"type": "image_url", "image_url": {"url": data_uri(next(images))}} if part is None
        else {"type": "text", "text": part}
        for part in parts
    ]  # fmt: skip


def _verbatim_parts(text: str) -> list[str | None]:
    """Parts that our own chat template writes as `text`: it ends the line after an image that something follows."""
    first, *after = text.split(IMAGE_TOKEN)
    parts: list[str | None] = [first]
    for entry in after:
        parts += [None, entry.removeprefix("\n")]
    return [part for part in parts if part != ""]


def data_uri(image: bytes) -> str:
    """The encoded image (JPEG or PNG) as a data: address."""
    kind = "png" if image.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
