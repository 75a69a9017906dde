"""The samples of prepared data as an audit sees them: answers as numbers, texts read again where they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.audit.scripts import script_of
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.prepare.validation.deduplicate import counted_question
from vlmpipe.trainer.data.sample import SPLITS, Split, Turn, stable_digest
from vlmpipe.trainer.data.shards.index import Index, SplitIndex
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader

SHOWN_CHARACTERS = 200  # of a question or an answer
TURN = np.dtype(
    [
        ("sample", "<i4"),  # number of the sample over all splits
        ("turn", "<i4"),  # index of the turn in its conversation
        ("question", "<u8"),  # digest of its text; 0 of one that is too long to be compared
        ("answer", "<u8"),  # digest of its text without case, full stop and white space around it
        ("characters", "<i4"),  # of the answer
        ("script", "<u2"),  # of the answer, see `scripts`
    ]
)


@dataclass(frozen=True)
class PreparedSamples:
    """The samples of prepared data where they are stored, by split in the order of SPLITS."""

    index: Index
    splits: tuple[SplitIndex, ...]
    shards: ShardReader

    @classmethod
    def open(cls, prepared_uri: str) -> PreparedSamples:
        """Open prepared data, local or in a bucket."""
        index, storage = Index.load(prepared_uri), open_prepared(prepared_uri)
        return cls(index, tuple(index.split(name) for name in SPLITS), ShardReader.open(storage))


@dataclass(frozen=True)
class Catalogue:
    """All samples of prepared data. Numbers of samples count over the splits in the order of SPLITS.

    turns: one TURN for each answer that is a label. first_image: (samples,) row of the first image among `images`, -1
    for none. Memory: 28 bytes an answer, and 36 an image.
    """

    stored: PreparedSamples
    turns: NDArray[np.void]
    images: NDArray[np.bytes_]  # (images,) hashes of the distinct images, in order
    image_rows: NDArray[np.int64]  # (uses,) row of each sample's images
    first_use: NDArray[np.int64]  # (samples + 1,) in image_rows

    def __len__(self) -> int:
        return len(self.first_use) - 1

    @property
    def splits(self) -> tuple[SplitIndex, ...]:
        return self.stored.splits

    @property
    def shards(self) -> ShardReader:
        return self.stored.shards

    @cached_property
    def starts(self) -> list[int]:
        """Number of the first sample of each split."""
        return np.cumsum([0, *map(len, self.splits)]).tolist()

    def place(self, sample: int) -> tuple[SplitIndex, int]:
        """The split of a sample and its number there."""
        of_split = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return self.splits[of_split], sample - self.starts[of_split]

    def id_of(self, sample: int) -> str:
        split, number = self.place(sample)
        return split.ids[number]

    def split_of(self, sample: int) -> Split:
        return self.place(sample)[0].name

    def images_of(self, sample: int) -> NDArray[np.int64]:
        """Rows of the sample's images."""
        return self.image_rows[self.first_use[sample] : self.first_use[sample + 1]]

    def conversation(self, sample: int) -> tuple[Turn, ...]:
        split, number = self.place(sample)
        return self.shards.turns(split.sample_location(number))

    def texts(self, sample: int, turn: int = 0) -> tuple[str, str]:
        """A turn's question and answer as they are shown."""
        turns = self.conversation(sample)
        shown_turn = turns[min(turn, len(turns) - 1)]
        return _shown(shown_turn.question.replace(IMAGE_TOKEN, "").strip()), _shown(shown_turn.answer)

    def samples_by_image(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(images + 1,) where the samples of each image begin, and the samples, each once an image."""
        owners = np.repeat(np.arange(len(self)), np.diff(self.first_use))
        pairs = np.unique(np.stack([self.image_rows, owners], axis=1), axis=0) if len(owners) else np.zeros((0, 2), int)
        starts = np.searchsorted(pairs[:, 0], np.arange(len(self.images) + 1))
        return starts, pairs[:, 1]


def read_catalogue(prepared_uri: str, progressed: Callable[[int, int], None]) -> Catalogue:
    """Read all conversations once. `progressed`: samples read, and all."""
    stored = PreparedSamples.open(prepared_uri)
    splits, shards = stored.splits, stored.shards
    total, first, parts = sum(map(len, splits)), 0, []
    for split in splits:
        for done, number in enumerate(split.stored_order().tolist()):
            parts.append(_turns_of(first + number, shards.turns(split.sample_location(number))))
            progressed(first + done + 1, total)
        first += len(split)
    turns = np.concatenate(parts) if parts else np.zeros(0, TURN)
    turns = turns[np.lexsort((turns["turn"], turns["sample"]))]
    hashes = np.concatenate([split.images() for split in splits])
    images, rows = np.unique(hashes, return_inverse=True)
    counts = np.concatenate([split.image_count for split in splits])
    return Catalogue(stored, turns, images, rows.astype(np.int64), np.cumsum([0, *counts.tolist()]))


def _turns_of(sample: int, turns: Sequence[Turn]) -> NDArray[np.void]:
    rows = [
        (
            sample,
            number,
            _digest(counted_question(turn.question)),
            _digest(plain(turn.answer)),
            len(turn.answer),
            script_of(turn.answer),
        )
        for number, turn in enumerate(turns)
        if not turn.is_context
    ]
    return np.array(rows, TURN)


def plain(answer: str) -> str:
    """The text by which answers are taken for the same one."""
    return " ".join(answer.casefold().split()).rstrip(".")


def _digest(text: str) -> int:
    return int(stable_digest(text)[:16], 16) | 1 if text else 0


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
