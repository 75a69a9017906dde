"""Optimizer state on a local disk (`train.nvme_path`), in memory-mapped tensors.

The kernel pages state in and out as updates touch it. The files are unnamed, so their space is freed when the process
ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from vlmpipe.trainer.errors import ExitCode, UserError

GIB = 1 << 30
MOUNTS = Path("/proc/self/mounts")
IN_MEMORY = ("tmpfs", "ramfs")  # file systems
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names in AdamW
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class NvmeOffload:
    """Tensors of this process in files in `folder`."""

    def __init__(self, folder: Path) -> None:
        """Raise UserError where nothing can be written (73: no space, else 77) or the folder is in memory (64)."""
        self._folder = folder
        self._mapped: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by data pointer
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(
                f"train.nvme_path: nothing can be written to {folder}: {error.strerror}",
                expected="a folder on a local disk that this process may write to",
                fix="mount the disk there, or name another folder",
                code=ExitCode.CANNOT_WRITE if error.errno in NO_ROOM else ExitCode.NO_PERMISSION,
            ) from error
        if (kind := file_system(folder)) in IN_MEMORY:
            raise UserError(
                f"train.nvme_path: {folder} is a {kind}, whose files lie in memory",
                expected="a folder on a local disk",
                fix="name another folder; train.offload without train.nvme_path keeps state in memory",
            )

    @property
    def addresses(self) -> Container[int]:
        """Data pointers of all mapped tensors; a live view."""
        return self._mapped

    def held_bytes(self) -> int:
        """Bytes mapped by this process."""
        return sum(len(mapped) for mapped in self._mapped.values())

    def zeros(self, like: Tensor) -> Tensor:
        """A mapped tensor of zeros. Raises UserError (73) where the disk has no space."""
        if not like.nbytes:
            return torch.zeros_like(like)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            try:  # space that is missing later would be a SIGBUS
                _take_room(file.fileno(), like.nbytes)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                raise self._full(like.nbytes) from error
            mapped = mmap.mmap(file.fileno(), like.nbytes)
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            mapped.madvise(mmap.MADV_SEQUENTIAL)  # an update reads it once, front to back
        numbers = torch.frombuffer(mapped, dtype=like.dtype).view(like.shape)
        self._mapped[numbers.data_ptr()] = mapped
        return numbers

    def copied(self, tensor: Tensor) -> Tensor:
        """A mapped copy of `tensor`."""
        return self.zeros(tensor).copy_(tensor.detach())

    def moved(self, tensor: Tensor) -> Tensor:
        """`tensor` if it is mapped already, else a mapped copy."""
        return tensor if tensor.data_ptr() in self._mapped or not tensor.nbytes else self.copied(tensor)

    def keep(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
        """Map the moments of `parameters`, with AdamW's initial zeros where there are none yet."""
        for parameter in parameters:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state |= {name: self.zeros(parameter) for name in MOMENTS}
            state |= {name: self.moved(state[name]) for name in MOMENTS}

    @contextlib.contextmanager
    def keeping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Map the state of parameters whose first update happens inside this context."""

        def before_update(updating: torch.optim.Optimizer, *_: Any) -> None:
            self.keep(updating, [each for group in updating.param_groups for each in group["params"]])

        hook = optimizer.register_step_pre_hook(before_update)
        yield
        hook.remove()

    def _full(self, needed_bytes: int) -> UserError:
        room = os.statvfs(self._folder)
        return UserError(
            f"train.nvme_path: {self._folder} has {room.f_bavail * room.f_frsize / GIB:,.2f} GiB left, too few for "
            f"{needed_bytes / GIB:,.2f} GiB of optimizer state",
            expected="room for 12 bytes of each trained parameter of this node's ranks, 16 with train.ema_decay",
            fix="free space, name a folder on a larger disk, or share the state among more nodes",
            code=ExitCode.CANNOT_WRITE,
        )


def _take_room(file: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size_bytes)
    else:  # macOS has no such call: space is allocated on use
        os.truncate(file, size_bytes)


def file_system(folder: Path) -> str:
    """The kernel's name for the type of file system of `folder`; empty where unknown."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return ""
    real, found, depth = folder.resolve(), "", -1
    for line in lines:
        _, place, kind, *_ = line.split()
        point = Path(place.replace("\\040", " "))
        if real.is_relative_to(point) and len(point.parts) >= depth:  # a later mount hides an earlier one
            found, depth = kind, len(point.parts)
    return found
