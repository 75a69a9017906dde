"""Images of the sources with an address, in their planned splits: what the start model may be asked about."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from vlmpipe.trainer.data.prepare.chunks.plan import planned_samples
from vlmpipe.trainer.data.rejects import RejectedError
from vlmpipe.trainer.data.sample import ImageRef, Sample, Split, content_of, stable_digest
from vlmpipe.trainer.data.sources import Source
from vlmpipe.trainer.data.sqlite_table import disk_table
from vlmpipe.trainer.errors import UserError

SCHEMA = "CREATE TABLE seen (kind TEXT, value TEXT, PRIMARY KEY (kind, value)) WITHOUT ROWID"


class OtherImages:
    """Images of training samples by their names, and of validation samples by their bytes.

    What was met is in a table on disk: memory does not grow with the images. excluded: ids of `data.exclude`.
    """

    def __init__(self, source: Source, plan: Path, excluded: Collection[str]) -> None:
        self._source, self._plan, self._excluded = source, plan, excluded
        self._seen = disk_table(SCHEMA)
        self.training = 0  # distinct names of training images that were met
        self.videos = 0
        for image in self._of_split("eval"):
            if (data := read_image(image[1])) is not None:
                self._is_new("validation", content_of(data))

    def names(self, seed: int) -> Iterator[tuple[float, ImageRef]]:
        """Each distinct training image that is no video, with a number in [0, 1) drawn by its name and `seed`."""
        for source, image in self._of_split("train"):
            if not self._is_new("name", stable_digest(source, image.name)[:32]):
                continue
            self.training += 1
            if image.clip:
                self.videos += 1
            else:
                yield int(stable_digest("replay", str(seed), source, image.name)[:16], 16) / 2**64, image

    def is_in_validation(self, content: str) -> bool:
        """Return whether a validation sample has an image with these bytes, see `content_of`."""
        answer = self._seen.execute("SELECT 1 FROM seen WHERE kind = 'validation' AND value = ?", (content,))
        return answer.fetchone() is not None

    def is_first(self, content: str) -> bool:
        """Return whether no image with these bytes was asked for before."""
        return self._is_new("taken", content)

    def _is_new(self, kind: str, value: str) -> bool:
        return self._seen.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (kind, value)).rowcount == 1

    def _of_split(self, split: Split) -> Iterator[tuple[str, ImageRef]]:
        """Images with the names of their sources."""
        for sample, planned in planned_samples(self._source, self._plan, self._excluded):
            if planned == split:
                name = _source_of(sample)
                yield from ((name, image) for image in sample.images)


def _source_of(sample: Sample) -> str:
    return sample.id.partition("/")[0]


def read_image(image: ImageRef) -> bytes | None:
    """The image's bytes; None where it cannot be read: preparation rejects its samples."""
    try:
        return image.read()
    except (RejectedError, UserError):
        return None
