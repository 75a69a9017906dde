"""Store of prepared chunks between runs: folders addressed by content, complete once DONE exists.

All of it may be deleted while nothing is being prepared. It costs time, never data: prepared sets are whole without it.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from trainer.storage import open_storage
from trainer.storage.base import AlreadyExistsError, Storage, crc32c_of_file, join_uri

DONE = "DONE"
UPLOADS = 8  # at the same time: small files are a wait each, in a bucket for the answer, in a folder for the disk


class ChunkStore:
    """Folders under `<root>/chunks`."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def files(self, name: str) -> Storage:
        return open_storage(join_uri(self._uri, name))

    def holds(self, name: str) -> bool:
        """Whether the folder is there and every file in it has the bytes that were written."""
        files = self.files(name)
        if files.stat(DONE) is None:
            return False
        found = {info.name: info for info in files.list()}
        for file, (size_bytes, crc32c) in json.loads(files.read(DONE)).items():
            info = found.get(file)
            if info is None or info.size_bytes != size_bytes or _crc32c(files, file, info.crc32c) != crc32c:
                files.delete(DONE)
                return False
        return True

    def put(self, name: str, folder: Path) -> None:
        """Store what is in `folder`, DONE last. Two writers of one name write the same bytes."""
        files = self.files(name)
        sums = {file: (path.stat().st_size, crc32c_of_file(path)) for file, path in files_in(folder).items()}
        upload_folder(files, folder, sums)
        with suppress(AlreadyExistsError):
            files.create(DONE, json.dumps(sums).encode())

    def get(self, name: str, folder: Path) -> bool:
        """Put a copy of what is stored into `folder`. False when it is not there or not whole."""
        if not self.holds(name):
            return False
        files = self.files(name)
        for file in json.loads(files.read(DONE)):
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files.read(file))
        return True


def files_in(folder: Path) -> dict[str, Path]:
    """Every file in and below the folder, by its name in a store."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def upload_folder(storage: Storage, folder: Path, sums: dict[str, tuple[int, int]] | None = None) -> None:
    """Write every file of the folder, several at a time. `sums`: size in bytes and CRC32C that each must have."""

    def upload(name: str, path: Path) -> None:
        storage.upload(path, name, crc32c=sums[name][1] if sums else None)

    files = files_in(folder)
    with ThreadPoolExecutor(UPLOADS, "upload") as pool:
        for _ in pool.map(upload, files.keys(), files.values()):
            pass


def _crc32c(files: Storage, name: str, known: int | None) -> int:
    return crc32c_of_file(files.fetch(name)) if known is None else known
