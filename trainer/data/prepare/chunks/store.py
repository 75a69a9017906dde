"""Store of prepared chunks between runs: folders addressed by content, complete once DONE exists.

Its content may be deleted while nothing is being prepared: the next preparation takes longer, but no data is lost.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import AlreadyExistsError, Storage, join_uri
from vlmpipe.trainer.storage.file_sums import FileSum, damaged_files, upload_folder

DONE = "DONE"


class ChunkStore:
    """Folders under `<root>/chunks`."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def files(self, name: str) -> Storage:
        return open_storage(join_uri(self._uri, name))

    def holds(self, name: str) -> bool:
        """Return whether the folder is complete and every file in it undamaged. Removes DONE of a damaged one."""
        files = self.files(name)
        if files.stat(DONE) is None:
            return False
        sums = {file: FileSum(*values) for file, values in json.loads(files.read(DONE)).items()}
        if damaged_files(files, sums):
            files.delete(DONE)
            return False
        return True

    def put(self, name: str, folder: Path) -> None:
        """Store the files in `folder`, DONE last. Two writers of one name write the same bytes."""
        files = self.files(name)
        sums = {file: astuple(whole) for file, whole in upload_folder(files, folder).items()}
        with suppress(AlreadyExistsError):
            files.create(DONE, json.dumps(sums).encode())

    def forget(self, name: str) -> None:
        """Make the folder incomplete, if it is there."""
        files = self.files(name)
        if files.stat(DONE) is not None:
            files.delete(DONE)

    def get(self, name: str, folder: Path) -> bool:
        """Copy the stored chunk into `folder`. False when it is missing or damaged."""
        if not self.holds(name):
            return False
        files = self.files(name)
        for file in json.loads(files.read(DONE)):
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            files.download(file, target)  # piece by piece: a plan has a line for each record
        return True
