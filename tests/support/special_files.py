"""What may stand in a file's place that is no regular file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


INSTEAD: dict[str, Callable[[Path], None]] = {
    "FIFO": _instead(os.mkfifo),
    "device": _instead(lambda path: path.symlink_to("/dev/zero")),
    "link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "link to nowhere": _instead(lambda path: path.symlink_to("not-here")),
    "folder": _instead(Path.mkdir),
}
