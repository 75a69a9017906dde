"""Stands in for a file system that lacks an operation: in a folder, the call raises the errno that such a one answers.

Put on PYTHONPATH as sitecustomize, it does so in every process, as VLMPIPE_TEST_LACKS says: FOLDER:link=EPERM,...
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any

VARIABLE = "VLMPIPE_TEST_LACKS"
# As reported of: CIFS, VirtualBox and FUSE; Lustre, NFS and Weka; gcsfuse, SMB, exFAT and 9p; mounts of another user.
ANSWERS = {
    "fsync_folder": ("EINVAL", "ENOTSUP", "ENOSYS"),
    "flock": ("ENOLCK", "ENOSYS", "ENOTSUP"),
    "link": ("EPERM", "ENOTSUP", "ENOSYS", "EMLINK"),
    "chmod": ("EPERM", "ENOTSUP"),
    "utime": ("EPERM",),
}
NAMES = {"fsync_folder": (os, "fsync"), "flock": (fcntl, "flock")}


def lacking(answers: Mapping[str, str], below: str | os.PathLike[str]) -> dict[tuple[Any, str], Callable[..., Any]]:
    """Module and name of what to replace, and by what, for operations and the errno that each answers with."""
    return dict(_replaced(operation, answer, os.path.realpath(below)) for operation, answer in answers.items())


def _replaced(operation: str, answer: str, below: str) -> tuple[tuple[Any, str], Callable[..., Any]]:
    module, name = NAMES.get(operation, (os, operation))
    original = getattr(module, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if _path(arguments[0]).startswith(below) and (operation != "fsync_folder" or _is_folder(arguments[0])):
            number = getattr(errno, answer)
            raise OSError(number, os.strerror(number))
        return original(*arguments, **options)

    return (module, name), call


def _path(subject: Any) -> str:
    """Of a path, a descriptor or a file."""
    if isinstance(subject, str | os.PathLike):
        return os.path.realpath(subject)
    return os.readlink(f"/proc/self/fd/{subject if isinstance(subject, int) else subject.fileno()}")


def _is_folder(handle: int) -> bool:
    return stat.S_ISDIR(os.fstat(handle).st_mode)


if VARIABLE in os.environ:
    folder, _, given = os.environ[VARIABLE].rpartition(":")
    for (place, name), by in lacking(dict(part.split("=") for part in given.split(",")), folder).items():
        setattr(place, name, by)
