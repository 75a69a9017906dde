"""Optimizer state on a local disk (`train.nvme_path`): memory-mapped tensors.

The system reads what an update touches and writes it back in its own time, and what does not fit into memory is on the
disk alone. Files have no name: their room is free again when the process ends, however it does.
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

from trainer.errors import ExitCode, UserError

GIB = 1 << 30
MOUNTS = Path("/proc/self/mounts")
IN_MEMORY = ("tmpfs", "ramfs")  # file systems
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names for those of AdamW
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class NvmeOffload:
    """Room in `folder` for tensors of this process."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError where nothing can be written (73 without room, else 77), or where files would lie in memory
        (64)."""
        self._folder = folder
        self._mapped: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by the address of its numbers
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
        """Of the numbers of all tensors that lie here, now and later."""
        return self._mapped

    def held_bytes(self) -> int:
        """Of this process."""
        return sum(len(mapped) for mapped in self._mapped.values())

    def zeros(self, like: Tensor) -> Tensor:
        """Numbers of a file, 0 to begin with. Raises UserError (73) where the disk has no room."""
        if not like.nbytes:
            return torch.zeros_like(like)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            try:  # room that is missing later would be a SIGBUS
                _take_room(file.fileno(), like.nbytes)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                raise self._full(like.nbytes) from error
            mapped = mmap.mmap(file.fileno(), like.nbytes)
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            mapped.madvise(mmap.MADV_SEQUENTIAL)  # an update goes through it once, from front to back
        numbers = torch.frombuffer(mapped, dtype=like.dtype).view(like.shape)
        self._mapped[numbers.data_ptr()] = mapped
        return numbers

    def copied(self, tensor: Tensor) -> Tensor:
        """The numbers of `tensor` in a file."""
        return self.zeros(tensor).copy_(tensor.detach())

    def moved(self, tensor: Tensor) -> Tensor:
        """`tensor` itself if it lies here already, and else its copy."""
        return tensor if tensor.data_ptr() in self._mapped or not tensor.nbytes else self.copied(tensor)

    def keep(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
        """Move the moments of `parameters` here. Those that have none yet get AdamW's first ones, as torch makes them
        in memory."""
        for parameter in parameters:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state |= {name: self.zeros(parameter) for name in MOMENTS}
            state |= {name: self.moved(state[name]) for name in MOMENTS}

    @contextlib.contextmanager
    def keeping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """What is updated for the first time in here has its state on the disk."""

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
    else:  # macOS has no such call: there room is taken as it is used
        os.truncate(file, size_bytes)


def file_system(folder: Path) -> str:
    """The kind of file system that `folder` is on, as the kernel names it; empty where it does not say."""
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:  # not Linux
        return ""
    real, found, depth = folder.resolve(), "", -1
    for line in lines:
        _, place, kind, *_ = line.split()
        point = Path(place.replace("\\040", " "))
        if real.is_relative_to(point) and len(point.parts) >= depth:  # a later mount hides an earlier one
            found, depth = kind, len(point.parts)
    return found
