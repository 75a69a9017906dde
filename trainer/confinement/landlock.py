"""Folders that a process and its children may read and write, held by the Linux kernel (Landlock).

Numbers and structures are those of linux/landlock.h; the kernel's documentation is userspace-api/landlock.rst.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable
from enum import IntFlag

from vlmpipe.trainer.errors import ExitCode, UserError

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # of all architectures
VERSION_FLAG, PATH_BENEATH, NO_NEW_PRIVILEGES = 1, 1, 38
MIN_ABI = 2  # with 1, no file can be renamed or linked into another folder


class Access(IntFlag):
    """LANDLOCK_ACCESS_FS_*: rights to files and folders."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14  # ABI 3


READ = Access.EXECUTE | Access.READ_FILE | Access.READ_DIR
OF_FILES = Access.EXECUTE | Access.WRITE_FILE | Access.READ_FILE | Access.TRUNCATE


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi() -> int:
    """Version of Landlock's interface; 0 where the system has none, or it is switched off."""
    try:
        return max(_call(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION_FLAG)), 0)
    except (OSError, AttributeError):  # another system's C library has no syscall(), or the kernel no such call
        return 0


def restrict_files(*, writable: Iterable[str], readable: Iterable[str]) -> None:
    """Let this thread and the processes that it starts open nothing else. It cannot be taken back.

    Call it before the process has other threads, which it leaves as they are. Places that do not exist are left out.

    Raises UserError (69) where the kernel cannot.
    """
    version = abi()
    if version < MIN_ABI:
        raise UserError(
            f"this system has no Landlock that can hold files (version {version})",
            expected=f"Linux with Landlock {MIN_ABI} or later",
            fix="start vlmpipe mcp with --without-landlock: then only arguments and run files are checked",
            code=ExitCode.UNAVAILABLE,
        )
    every = ~Access(0) if version >= 3 else ~Access.TRUNCATE
    rules = _call(CREATE_RULESET, ctypes.byref(_Ruleset(int(every))), ctypes.c_size_t(8), ctypes.c_uint32(0))
    try:
        for places, access in ((writable, every), (readable, READ)):
            for place in places:
                _allow(rules, place, access)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
        _call(RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))
    finally:
        os.close(rules)


def _allow(rules: int, place: str, access: Access) -> None:
    try:
        handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            access &= OF_FILES
        beneath = _Beneath(int(access), handle)
        _call(ADD_RULE, ctypes.c_int(rules), ctypes.c_int(PATH_BENEATH), ctypes.byref(beneath), ctypes.c_uint32(0))
    finally:
        os.close(handle)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number} of Landlock")
    return result
