"""Chooses and writes the questions for the start model.

They are its own training data's, where that is known, and else general ones about the other sources' training images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.exclusions.exclusion_file import read_exclusions
from vlmpipe.trainer.data.fetching.folder import with_fetched_folder
from vlmpipe.trainer.data.prepare.chunks.prepare import make_plan
from vlmpipe.trainer.data.prepare.fetch_images import fetch_images
from vlmpipe.trainer.data.prepare.scratch import scratch
from vlmpipe.trainer.data.replay.part_size import part_rows
from vlmpipe.trainer.data.replay.place import folder_of, point_to, prompts_of
from vlmpipe.trainer.data.replay.start_data import StartData, start_data
from vlmpipe.trainer.data.sample import content_of, stable_digest
from vlmpipe.trainer.data.sources import Source, open_source
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.evaluation.replay.other_images import OtherImages, read_image
from vlmpipe.trainer.evaluation.replay.start_samples import StartSamples
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.replay import ReplayAnswers, ReplayPointer, ReplayQuestions
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage

PART_BYTES = 64 << 20
SCHEMA = pa.schema([("id", pa.string()), ("image", pa.binary()), ("question", pa.string())])
QUESTIONS = "questions"  # folder of the parts
CHOOSING = "choosing questions for the start model"


@dataclass(frozen=True)
class ChosenReplay:
    """The folder of the answers, the questions, and the answers if they are there already."""

    folder: str
    questions: ReplayQuestions
    answers: ReplayAnswers | None
    why_images: str  # are asked about, and not the start model's own data

    def described(self) -> str:
        """Describe the questions for people, with the reason."""
        return self.questions.described(self.why_images)


def part_name(number: int) -> str:
    return f"{number:05d}"


def choose(config: JobConfig, progress: Progress) -> ChosenReplay:
    """Point the run to its answers' folder; write the questions there if there are none.

    Raises DataError where the other sources have no image for training, or nothing is chosen.
    """
    about = _asked_about(config)
    prompts = () if about.uri else prompts_of(config.data)
    others = with_fetched_folder(config.model_copy(update={"data": config.data.without_replay()}))
    if others.data.fetch:
        fetch_images(others, progress)
    source = open_source(others.data)
    folder = folder_of(config, source, prompts, about)
    store = open_storage(folder)
    questions = ReplayQuestions.read_if_there(store)
    if questions is None:
        questions = _write(others, source, _Choosing(config, about, prompts), store, progress)
    point_to(config, ReplayPointer(folder=folder, why_images=about.obstacle))
    return ChosenReplay(folder, questions, ReplayAnswers.read_if_there(store), about.obstacle)


def answers_there(config: JobConfig) -> ReplayAnswers | None:
    """The answers that `choose` would find for the run, by weights, data and settings; None where it would ask.

    Writes nothing. Raises UserError where a source is not there.
    """
    about = _asked_about(config)
    others = with_fetched_folder(config.model_copy(update={"data": config.data.without_replay()}))
    prompts = () if about.uri else prompts_of(config.data)
    folder = folder_of(config, open_source(others.data), prompts, about)
    return ReplayAnswers.read_if_there(open_storage(folder))


def _asked_about(config: JobConfig) -> StartData:
    """The start model's own training data; without an address where other sources' images are asked about.

    A run that resumes keeps to what it chose. Raises DataError where the data is asked for and not known.
    """
    replay = config.data.replay
    assert replay
    if obstacle := replay.why_about_images:
        return StartData(obstacle=obstacle)
    if pointer := ReplayPointer.read_if_there(open_storage(config.run.run_uri)):
        chosen = ReplayQuestions.read_if_there(open_storage(pointer.folder))
        if chosen and chosen.start_data:
            return StartData(chosen.start_data)
        if chosen and replay.replay_about == "auto":
            return StartData(obstacle=pointer.why_images)
    about = start_data(config.model)
    if not about.uri and replay.replay_about == "start_data":
        raise DataError(
            f"replay_about is start_data, but {about.obstacle}",
            expected="a start model from a run, such as run:RUN_ID, whose prepared data is there",
            fix="prepare that run's data again, or leave replay_about out, which then asks about the other images",
        )
    return about


@dataclass(frozen=True)
class _Choosing:
    """The start model's own data, or prompts about the other sources' images."""

    config: JobConfig
    about: StartData
    prompts: tuple[str, ...]


def _write(
    others: JobConfig, source: Source, choosing: _Choosing, store: Storage, progress: Progress
) -> ReplayQuestions:
    replay = choosing.config.data.replay
    assert replay
    with scratch() as place:
        plan = place / "plan"
        plan.mkdir()
        make_plan(others, source, plan, progress)
        images = OtherImages(source, plan, read_exclusions(choosing.config.data.exclude).ids)
        writer = _Parts(store, place)
        ask = _ask_start_samples if choosing.about.uri else _ask_about_images
        left_out = ask(choosing, images, writer, progress)
        writer.close()
    if not writer.rows:
        there = f"{images.training:,} training images" if images.training else "no training images"
        raise DataError(
            f"the sources beside {replay.name} have {there}, and none of their questions is chosen for the start model",
            expected="images, by whose number it is asked",
            fix=f"raise replay_images, now {replay.replay_images:g}"
            if images.training
            else "name a source with images",
        )
    questions = ReplayQuestions(
        parts=writer.parts, images=writer.rows, training_images=images.training, image_bytes=writer.bytes,
        in_validation=left_out.in_validation, repeated=left_out.repeated, videos=images.videos,
        start_data=choosing.about.uri, unsuitable=left_out.unsuitable, unread=left_out.unread,
    )  # fmt: skip
    questions.write(store)
    return questions


@dataclass
class _LeftOut:
    """Counts of chosen questions that are not asked."""

    in_validation: int = 0
    repeated: int = 0
    unsuitable: int = 0
    unread: int = 0


def _ask_about_images(choosing: _Choosing, images: OtherImages, writer: _Parts, progress: Progress) -> _LeftOut:
    replay, left_out = choosing.config.data.replay, _LeftOut()
    assert replay
    for drawn, image in images.names(replay.replay_seed):
        if drawn >= replay.replay_images:
            continue
        if (data := read_image(image)) is None:
            left_out.unread += 1
            continue
        progress.update(writer.rows, unit="images", message=CHOOSING)
        content = content_of(data)
        if images.is_in_validation(content):
            left_out.in_validation += 1
        elif not images.is_first(content):
            left_out.repeated += 1
        else:
            number = int(stable_digest("prompt", str(replay.replay_seed), content)[:16], 16)
            writer.add(stable_digest(content)[:16], data, choosing.prompts[number % len(choosing.prompts)])
    return left_out


def _ask_start_samples(choosing: _Choosing, images: OtherImages, writer: _Parts, progress: Progress) -> _LeftOut:
    replay, left_out = choosing.config.data.replay, _LeftOut()
    assert replay
    still = sum(1 for _ in images.names(replay.replay_seed))
    samples = StartSamples(choosing.about.uri)
    for chosen in samples.drawn(math.ceil(still * replay.replay_images), replay.replay_seed):
        progress.update(writer.rows, unit="images", message=CHOOSING)
        if images.is_in_validation(content_of(chosen.image)):
            left_out.in_validation += 1
        else:
            writer.add(chosen.identity[:16], chosen.image, chosen.question)
    left_out.unsuitable = samples.unsuitable
    return left_out


class _Parts:
    """Writes questions into files of as many as `part_rows` says, and of about PART_BYTES of images at most."""

    def __init__(self, store: Storage, scratch_folder: Path) -> None:
        self._store, self._path = store, scratch_folder / "part.parquet"
        self._ids, self._images, self._questions = list[str](), list[bytes](), list[str]()
        self.parts = self.rows = self.bytes = 0

    def add(self, identity: str, image: bytes, question: str) -> None:
        self._ids.append(identity)
        self._images.append(image)
        self._questions.append(question)
        self.rows, self.bytes = self.rows + 1, self.bytes + len(image)
        if len(self._ids) >= part_rows(self.rows - len(self._ids)) or sum(map(len, self._images)) > PART_BYTES:
            self.close()

    def close(self) -> None:
        if not self._ids:
            return
        table = pa.table([self._ids, self._images, self._questions], schema=SCHEMA)
        pq.write_table(table, self._path)
        self._store.upload(self._path, f"{QUESTIONS}/{part_name(self.parts)}.parquet")
        self._ids, self._images, self._questions = [], [], []
        self.parts += 1
