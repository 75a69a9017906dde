"""Groups samples that must be in the same split: those that share an image or a field of the record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.sources.data_fields import BY_IMAGE, BY_RECORD
from vlmpipe.trainer.data.prepare.digest_files import DigestFiles, digests_of
from vlmpipe.trainer.data.sample import Sample, Split, split_of
from vlmpipe.trainer.data.sqlite_table import disk_table, short_digest
from vlmpipe.trainer.errors import DataError

FEWEST_COMMON = 20  # samples that an image must be in before its share counts
FEWEST_SPLIT = 100  # samples, below which shares say little
SHOWN = 3  # images named
DECISIONS = 1 << 14  # in memory


class ImageGroups:
    """Connected components of images that occur in the same record, as a union-find forest on disk.

    A component is identified by its smallest image, so that the order of records does not matter.
    """

    def __init__(self) -> None:
        self._table = disk_table("CREATE TABLE parents (image TEXT PRIMARY KEY, parent TEXT) WITHOUT ROWID")
        self._joined = False  # any

    def join(self, images: Sequence[str]) -> None:
        """Join the components of these images."""
        roots = {self.root(image) for image in images}
        first = min(roots)
        rows = [(root, first) for root in roots if root != first]
        self._table.executemany("INSERT OR REPLACE INTO parents VALUES (?, ?)", rows)
        self._joined = self._joined or bool(rows)

    def root(self, image: str) -> str:
        """The smallest image of the component."""
        if not self._joined:
            return image
        path = [image]
        while parent := self._table.execute("SELECT parent FROM parents WHERE image = ?", (path[-1],)).fetchone():
            path.append(parent[0])
        shorter = [(path[-1], below) for below in path[:-2]]
        self._table.executemany("UPDATE parents SET parent = ? WHERE image = ?", shorter)
        return path[-1]


class SampleGroups:
    """The groups of a source's samples, and the split of each.

    An image that more than `data.max_image_share` of the samples have beside others, such as a logo, joins no groups,
    except in samples that have no other.
    """

    def __init__(self, config: DataConfig) -> None:
        self._config, self._images = config, ImageGroups()
        self._several = disk_table("CREATE TABLE group_images (record INTEGER, image TEXT)")
        self._sizes = DigestFiles()  # of groups, each with its first record
        self._decisions: list[tuple[bytes, int]] = []  # digest of the group and record, before they are in `_sizes`
        self._common: dict[str, int] = {}  # samples that have the image beside others
        self._records = self._validation = self._decided = 0

    def add(self, record: int, group: Sequence[str]) -> None:
        """Add a record by its number from 1, and its `group_of`; an empty group where the source names the split."""
        self._records += 1
        if len(group) > 1:
            self._several.executemany("INSERT INTO group_images VALUES (?, ?)", ((record, image) for image in group))

    def join(self) -> None:
        """Join groups that share images, once all records were added."""
        most = max(FEWEST_COMMON, self._config.max_image_share * self._records)
        counts = "SELECT image, count(*) FROM group_images GROUP BY image HAVING count(*) > ?"
        self._common = dict(self._several.execute(counts, (most,)))
        rows = self._several.execute("SELECT record, image FROM group_images ORDER BY record, image")
        for _, group in groupby(rows, key=lambda row: int(row[0])):
            self._images.join(self._joining([image for _, image in group]))
        self._several.execute("CREATE INDEX by_image ON group_images (image)")
        self._several.execute("CREATE INDEX by_record ON group_images (record)")

    def split_of(self, record: int, member: str) -> Split:
        """The split of a record whose group has this member, its smallest."""
        group = self._group(record, member)
        split = split_of(group, self._config.validation_fraction)
        self._decided += 1
        self._validation += split == "eval"
        self._decisions.append((short_digest(group), record))
        if len(self._decisions) == DECISIONS:
            self._count_decisions()
        return split

    def _group(self, record: int, member: str) -> str:
        if member in self._common:
            rows = self._several.execute("SELECT image FROM group_images WHERE record = ? ORDER BY image", (record,))
            member = min(self._joining([image for (image,) in rows] or [member]))
        return self._images.root(member)

    def _count_decisions(self) -> None:
        if self._decisions:
            digests, records = zip(*self._decisions, strict=True)
            self._sizes.add(digests_of(digests), first=np.array(records))
            self._decisions = []

    def _joining(self, images: Sequence[str]) -> Sequence[str]:
        return [image for image in images if image not in self._common] or images

    def notes(self, place_of: Callable[[int], str]) -> list[str]:
        """The images that join no groups, for people. `place_of`: a record's place in the source."""
        return [
            f"an image of {place_of(self._record_with(image))} is beside others in {count:,} of {self._records:,} "
            "samples and joins no groups (data.max_image_share)"
            for image, count in sorted(self._common.items(), key=lambda item: -item[1])[:SHOWN]
        ]

    def check(self, place_of: Callable[[int], str], member_of: Callable[[int], str]) -> None:
        """Raise DataError where the share held out differs from `data.validation_fraction` by more than the groups but
        the largest explain.

        Four standard deviations of a sum of independent groups are taken for chance. `member_of`: what `split_of` was
        given with a record.
        """
        if self._decided < FEWEST_SPLIT:
            return
        fraction = self._config.validation_fraction
        self._count_decisions()
        largest, squares, record = 0, 0.0, 0
        for groups in self._sizes:
            sizes = groups["count"].astype(np.float64)
            squares += float(sizes @ sizes)
            if sizes.max(initial=0) > largest:
                record, largest = int(groups["first"][sizes.argmax()]), int(sizes.max())
        deviation = 4 * math.sqrt((squares - largest**2) * fraction * (1 - fraction)) / self._decided
        if largest == 1 or abs(self._validation / self._decided - fraction) <= self._config.max_split_error + deviation:
            return
        name = self._group(record, member_of(record))
        validation = f"{self._validation:,} of {self._decided:,} samples ({self._validation / self._decided:.0%})"
        share, why = f"{largest / self._decided:.0%}", self._reason(name, place_of)
        raise DataError(
            f"{validation} are held out for validation, and data.validation_fraction is {fraction:.0%}\n"
            f"  the largest group has {largest:,} samples ({share}), {why}",
            expected="groups that are small beside the whole, or a difference of at most data.max_split_error "
            f"{self._config.max_split_error:g}",
            fix="set data.split_by to record or to a field that groups the samples, or lower data.max_image_share; "
            "data.max_split_error: 1 takes the split as it is",
        )

    def _reason(self, group: str, place_of: Callable[[int], str]) -> str:
        """Key of a group: the image that most of its samples have, or the field's value."""
        if self._config.split_by not in (BY_IMAGE, BY_RECORD):
            return f"those of {group}"
        counts = (
            "SELECT image, count(*) FROM group_images GROUP BY image HAVING count(*) > 1 ORDER BY count(*) DESC, image"
        )
        for image, count in self._several.execute(counts).fetchall():
            if self._images.root(image) == group:
                return f"joined by an image of {place_of(self._record_with(image))}, which {count:,} of them have"
        return "of one image"

    def _record_with(self, image: str) -> int:
        row = self._several.execute("SELECT min(record) FROM group_images WHERE image = ?", (image,)).fetchone()
        return int(row[0])


def group_of(sample: Sample, images: Sequence[str], split_by: str) -> tuple[str, ...]:
    """The images, or the one name, that decide the sample's split.

    Args:
        sample: with its original id.
        images: identities of its images' bytes.
        split_by: `data.split_by`.
    """
    if split_by == BY_IMAGE and images:
        return tuple(sorted(set(images)))
    return (sample.id,) if split_by in (BY_IMAGE, BY_RECORD) else (f"{split_by} {sample.group}",)
