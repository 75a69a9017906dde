"""Groups samples that must be in the same split: those that share an image or a field of the record."""

from __future__ import annotations

from collections.abc import Sequence

from vlmpipe.trainer.config.data import BY_IMAGE, BY_RECORD
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.sqlite_table import disk_table


class ImageGroups:
    """Connected components of images that occur in the same record, as a union-find forest on disk.

    A component is identified by its smallest image, so that the order of records does not matter.
    """

    def __init__(self) -> None:
        self._table = disk_table("CREATE TABLE parents (image TEXT PRIMARY KEY, parent TEXT) WITHOUT ROWID")

    def join(self, images: Sequence[str]) -> None:
        """Join the components of these images."""
        roots = {self.root(image) for image in images}
        first = min(roots)
        rows = ((root, first) for root in roots if root != first)
        self._table.executemany("INSERT OR REPLACE INTO parents VALUES (?, ?)", rows)

    def root(self, image: str) -> str:
        """The smallest image of the component."""
        path = [image]
        while found := self._table.execute("SELECT parent FROM parents WHERE image = ?", (path[-1],)).fetchone():
            path.append(found[0])
        self._table.executemany(
            "UPDATE parents SET parent = ? WHERE image = ?", ((path[-1], below) for below in path[:-2])
        )
        return path[-1]


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
