"""Chooses the training images that the start model is asked about, and writes the questions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.exclusions.exclusion_file import read_exclusions
from vlmpipe.trainer.data.fetching.folder import with_fetched_folder
from vlmpipe.trainer.data.prepare.chunks.plan import read_plan
from vlmpipe.trainer.data.prepare.chunks.prepare import make_plan
from vlmpipe.trainer.data.prepare.fetch_images import fetch_images
from vlmpipe.trainer.data.prepare.scratch import scratch
from vlmpipe.trainer.data.replay.place import folder_of, point_to, prompts_of
from vlmpipe.trainer.data.sample import ImageRef, Sample, Split, content_of, stable_digest
from vlmpipe.trainer.data.sources import Source, open_source
from vlmpipe.trainer.errors import DataError, UserError
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.replay import ReplayAnswers, ReplayQuestions
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage

PART_ROWS, PART_BYTES = 256, 64 << 20
SCHEMA = pa.schema([("id", pa.string()), ("image", pa.binary()), ("question", pa.string())])
QUESTIONS = "questions"  # folder of the parts


@dataclass(frozen=True)
class ChosenReplay:
    """The folder of the answers, what is asked, and the answers if they are there already."""

    folder: str
    questions: ReplayQuestions
    answers: ReplayAnswers | None


def part_name(number: int) -> str:
    return f"{number:05d}"


def choose(config: JobConfig, progress: Progress) -> ChosenReplay:
    """Point the run to its answers' folder; write the questions there if there are none.

    Raises DataError where the other sources have no image for training, or none is chosen.
    """
    prompts = prompts_of(config.data)
    others = with_fetched_folder(config.model_copy(update={"data": config.data.without_replay()}))
    if others.data.fetch:
        fetch_images(others, progress)
    source = open_source(others.data)
    folder = folder_of(config, source, prompts)
    store = open_storage(folder)
    questions = ReplayQuestions.read_if_there(store)
    if questions is None:
        questions = _write(config, others, source, prompts, store, progress)
    point_to(config, folder)
    return ChosenReplay(folder, questions, ReplayAnswers.read_if_there(store))


def _write(
    config: JobConfig, others: JobConfig, source: Source, prompts: tuple[str, ...], store: Storage, progress: Progress
) -> ReplayQuestions:
    replay = config.data.replay
    assert replay
    choice = _Choice(replay.replay_images, replay.replay_seed, read_exclusions(config.data.exclude).ids)
    with scratch() as place:
        plan = place / "plan"
        plan.mkdir()
        make_plan(others, source, plan, progress)
        writer = _Parts(store, place)
        validation_images = {
            content_of(data) for data, split in _images(source, plan, choice, "eval") if split == "eval"
        }
        for number, (data, _) in enumerate(_images(source, plan, choice, "train"), 1):
            progress.update(number, unit="images", message="choosing images for the start model")
            content = content_of(data)
            if content in validation_images:
                choice.in_validation += 1
            elif content in choice.taken:
                choice.repeated += 1
            else:
                choice.taken.add(content)
                drawn = int(stable_digest("prompt", str(replay.replay_seed), content)[:16], 16)
                writer.add(content, data, prompts[drawn % len(prompts)])
        writer.close()
    if not choice.taken:
        images = f"{len(choice.names):,} training images" if choice.names else "no training images"
        raise DataError(
            f"the sources beside {replay.name} have {images}, of which none is chosen for the start model",
            expected="images, about which it is asked",
            fix=f"raise replay_images, now {replay.replay_images:g}" if choice.names else "name a source with images",
        )
    questions = ReplayQuestions(
        parts=writer.parts, images=writer.rows, training_images=len(choice.names), image_bytes=writer.bytes,
        in_validation=choice.in_validation, repeated=choice.repeated, videos=choice.videos,
    )  # fmt: skip
    questions.write(store)
    return questions


@dataclass
class _Choice:
    """Which images are chosen: by their names, so that none is read for that."""

    share: float
    seed: int
    excluded: Collection[str]  # ids of samples
    names: set[int] = field(default_factory=set)  # digests of training images' names
    taken: set[str] = field(default_factory=set)
    in_validation: int = 0
    repeated: int = 0
    videos: int = 0

    def takes(self, source: str, image: ImageRef) -> bool:
        """Return whether an image of a training sample is chosen; False for one that was met before."""
        digest = int(stable_digest("replay", str(self.seed), source, image.name)[:16], 16)
        if digest in self.names:
            return False
        self.names.add(digest)
        if image.clip:
            self.videos += 1
            return False
        return digest < self.share * 2**64


def _images(source: Source, plan: Path, choice: _Choice, images_of: Split) -> Iterator[tuple[bytes, Split]]:
    """The images of the validation split, or those chosen from the training split. Unreadable ones are passed over:
    preparation rejects their samples."""
    splits = chain.from_iterable(chunk.splits() for chunk in read_plan(plan))
    for sample, split in zip(source, splits, strict=False):
        if not isinstance(sample, Sample) or split != images_of or sample.id in choice.excluded:
            continue
        name = sample.id.partition("/")[0]
        for image in sample.images:
            if images_of == "eval" or choice.takes(name, image):
                try:
                    yield image.read(), split
                except UserError:
                    continue


class _Parts:
    """Writes questions into files of at most PART_ROWS images."""

    def __init__(self, store: Storage, scratch_folder: Path) -> None:
        self._store, self._path = store, scratch_folder / "part.parquet"
        self._ids, self._images, self._questions = list[str](), list[bytes](), list[str]()
        self.parts = self.rows = self.bytes = 0

    def add(self, identity: str, image: bytes, question: str) -> None:
        self._ids.append(stable_digest(identity)[:16])
        self._images.append(image)
        self._questions.append(question)
        self.rows, self.bytes = self.rows + 1, self.bytes + len(image)
        if len(self._ids) == PART_ROWS or sum(map(len, self._images)) > PART_BYTES:
            self.close()

    def close(self) -> None:
        if not self._ids:
            return
        table = pa.table([self._ids, self._images, self._questions], schema=SCHEMA)
        pq.write_table(table, self._path)
        self._store.upload(self._path, f"{QUESTIONS}/{part_name(self.parts)}.parquet")
        self._ids, self._images, self._questions = [], [], []
        self.parts += 1
