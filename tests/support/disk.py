"""A disk that can be filled at will."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.terminal import Terminal

SIZE_BYTES = 16 << 20
LARGEST_FILE_BYTES = 32 << 10  # more than a run's small files have, less than a shard or a checkpoint


class SmallDisk:
    """A small file system of its own; where the user may not mount one, a limit on the size of files stands in."""

    def __init__(self, folder: Path, *, mounted: bool) -> None:
        self.folder, self._mounted = folder, mounted

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def fill(self, command: Terminal | None, *, leave_bytes: int) -> None:
        """Leave no more room than this to what the command writes."""
        if self._mounted:
            try:
                (self.folder / "ballast").write_bytes(bytes(self.free_bytes() - leave_bytes))
            except OSError as error:  # the command writes at the same time: there was less room than a moment ago
                if error.errno != errno.ENOSPC:
                    raise
            return
        assert command is not None
        for pid in command.left():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, LARGEST_FILE_BYTES))

    def free(self) -> None:
        """Make room again. The limit on files ends with the command that it was set for."""
        (self.folder / "ballast").unlink(missing_ok=True)


@contextlib.contextmanager
def ext4_disk(folder: Path) -> Iterator[SmallDisk]:
    """As `small_disk`, of a kind whose files do not lie in memory. Skips the test where none can be mounted."""
    folder.mkdir()
    image = folder.with_suffix(".ext4")
    image.touch()
    os.truncate(image, SIZE_BYTES)
    make = ["mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", str(image)]
    for command in (make, ["mount", "-o", "loop", str(image), str(folder)]):
        try:
            subprocess.run(command, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system of its own can be made and mounted here: {error}")
    try:
        yield SmallDisk(folder, mounted=True)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """A disk at `folder` for as long as the block lasts."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield SmallDisk(folder, mounted=mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
