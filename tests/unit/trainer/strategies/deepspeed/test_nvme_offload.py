"""Tensors in files: numbers, room, places where they cannot be."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.strategies.deepspeed.nvme_offload import NvmeOffload, file_system

SHARED_MEMORY = Path("/dev/shm")


@pytest.mark.parametrize("shape", [(0,), (1,), (1000, 3)])
def test_a_copy_has_the_same_numbers_and_is_its_own(shape: tuple[int, ...], tmp_path: Path) -> None:
    disk, numbers = NvmeOffload(tmp_path), torch.randn(shape)
    copied = disk.copied(numbers)
    assert torch.equal(copied, numbers) and copied.shape == numbers.shape and copied.dtype == numbers.dtype
    copied += 1
    assert not numbers.numel() or not torch.equal(copied, numbers)
    assert disk.moved(copied) is copied
    assert disk.held_bytes() == numbers.nbytes


def test_files_have_no_names_and_their_room_is_given_back(tmp_path: Path) -> None:
    disk = NvmeOffload(tmp_path / "made" / "for it")
    zeros = disk.zeros(torch.empty(1 << 20))
    assert not zeros.any() and zeros.data_ptr() in disk.addresses
    assert not list((tmp_path / "made" / "for it").iterdir())
    address = zeros.data_ptr()
    del zeros
    assert address not in disk.addresses and disk.held_bytes() == 0


def test_an_update_there_is_the_one_in_memory(tmp_path: Path) -> None:
    """Also of what is updated for the first time, and of moments that were put there by others."""
    disk, start, gradient = NvmeOffload(tmp_path), torch.randn(1000), torch.randn(1000)
    found = []
    for on_disk in (False, True):
        weight = torch.nn.Parameter(disk.copied(start) if on_disk else start.clone())
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
        weight.grad = gradient.clone()
        if on_disk:
            with disk.keeping(optimizer):
                optimizer.step()
            assert optimizer.state[weight]["exp_avg"].data_ptr() in disk.addresses
            optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].clone()
            disk.keep(optimizer, [weight])
            assert optimizer.state[weight]["exp_avg"].data_ptr() in disk.addresses
        else:
            optimizer.step()
        optimizer.step()
        found.append((weight.detach(), *(optimizer.state[weight][name] for name in ("step", "exp_avg", "exp_avg_sq"))))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_no_room_is_said_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = NvmeOffload(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"too few for 4\.00 GiB of optimizer state") as caught:
        disk.zeros(torch.empty(1 << 30, device="meta"))
    assert caught.value.code == ExitCode.CANNOT_WRITE
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"nothing can be written to .*/file/folder: Not a directory") as caught:
        NvmeOffload(tmp_path / "file" / "folder")
    assert caught.value.code == ExitCode.NO_PERMISSION


@pytest.mark.skipif(file_system(SHARED_MEMORY) != "tmpfs", reason="no tmpfs at /dev/shm")
def test_files_that_lie_in_memory_are_refused() -> None:
    with pytest.raises(UserError, match="is a tmpfs, whose files lie in memory"):
        NvmeOffload(SHARED_MEMORY)


def test_the_nearest_and_latest_mount_is_a_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "mounts"
    told.write_text(
        f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path}/a\\040b tmpfs rw 0 0\n/dev/sdb {tmp_path}/a\\040b/c xfs rw 0 0\n"
        f"/dev/sdc {tmp_path}/late ext4 rw 0 0\ntmpfs {tmp_path}/late tmpfs rw 0 0\n"
    )
    monkeypatch.setattr("vlmpipe.trainer.strategies.deepspeed.nvme_offload.MOUNTS", told)
    kinds = {name: file_system(tmp_path / name) for name in ("a b", "a b/c", "a b/c/d", "other", "late")}
    assert kinds == {"a b": "tmpfs", "a b/c": "xfs", "a b/c/d": "xfs", "other": "ext4", "late": "tmpfs"}
    monkeypatch.setattr("vlmpipe.trainer.strategies.deepspeed.nvme_offload.MOUNTS", tmp_path / "none")
    assert file_system(tmp_path) == ""
