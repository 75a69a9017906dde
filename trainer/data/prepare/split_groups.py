"""Decides each sample's split: samples that share a picture, or a field of the record, are never on both sides."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config.data import BY_IMAGE, BY_RECORD
from trainer.data.sample import Sample
from trainer.data.sqlite_table import disk_table


class ImageGroups:
    """Pictures that records join, directly or through others: connected components, as a forest on disk.

    A component is known by the least of its pictures, so that the order of the records does not matter.
    """

    def __init__(self) -> None:
        self._table = disk_table("CREATE TABLE parents (image TEXT PRIMARY KEY, parent TEXT) WITHOUT ROWID")

    def join(self, images: Sequence[str]) -> None:
        """These pictures belong together."""
        roots = {self.root(image) for image in images}
        first = min(roots)
        rows = ((root, first) for root in roots if root != first)
        self._table.executemany("INSERT OR REPLACE INTO parents VALUES (?, ?)", rows)

    def root(self, image: str) -> str:
        """The least picture of the component. A picture that was never joined is its own."""
        path = [image]
        while found := self._table.execute("SELECT parent FROM parents WHERE image = ?", (path[-1],)).fetchone():
            path.append(found[0])
        self._table.executemany(
            "UPDATE parents SET parent = ? WHERE image = ?", ((path[-1], below) for below in path[:-2])
        )
        return path[-1]


def group_of(sample: Sample, images: Sequence[str], split_by: str) -> tuple[str, ...]:
    """What decides the sample's split: pictures, or one name that is no picture's.

    Args:
        sample: with the id that its source gave it.
        images: what tells the bytes of its pictures apart from others.
        split_by: `data.split_by`.
    """
    if split_by == BY_IMAGE and images:
        return tuple(sorted(set(images)))
    return (sample.id,) if split_by in (BY_IMAGE, BY_RECORD) else (f"{split_by} {sample.group}",)
