"""Errors for people, and the exit codes of all commands and jobs."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from vlmpipe.trainer.extras import extra_of, install_command
from vlmpipe.trainer.printable import printable
from vlmpipe.trainer.redaction import hiding_secrets

DEBUG_VARIABLE = "VLMPIPE_DEBUG"  # if set, errors for people are printed with their traceback
EXIT_FOLDER_VARIABLE = "VLMPIPE_EXIT_FOLDER"  # folder in which workers write their exit codes for the launcher


class ExitCode(IntEnum):
    """Exit codes shared by `vlmpipe`, the launcher and every job. Values follow sysexits.h where it has one."""

    OK = 0
    UNEXPECTED = 1
    CONFIG = 64
    DATA = 65
    NOT_FOUND = 66  # no run, no published pipeline or no bucket of that name; no Kubeflow Trainer
    NO_LOGIN = 67  # no Google Cloud credentials, or they have run out
    BAD_RESULT = 68  # a training program ended well, but what it left is no finished model
    UNAVAILABLE = 69  # a dependency (service, package, weights, port) is not reachable
    NO_PROGRESS = 70  # training started again and again at the same step
    STALLED = 71  # no step for much longer than steps take: the watchdog ended the job
    SUPERSEDED = 72  # a later start of the same run took over
    CANNOT_WRITE = 73  # disk full or output not creatable
    CHECKPOINT_CORRUPT = 74
    PREEMPTED = 75  # stopped on request, resumable
    REJECTED = 76  # the gate rejected the model, and --fail-on-reject was given; or a law does not hold
    NO_PERMISSION = 77
    MACHINE = 78  # the machine lacks what the job's spec buys, such as its GPUs
    NOT_READY = 79  # vlmpipe doctor found that something is missing
    BAD_EXPORT = 80  # the exported model does not open as published ones of its type, or is not what was trained
    WRONG_KERNEL = 81  # a kernel of another package computes wrong numbers on this machine
    INTERRUPTED = 130  # Ctrl-C at the command line


CAUSES = frozenset(
    {
        ExitCode.CONFIG, ExitCode.DATA, ExitCode.UNAVAILABLE, ExitCode.CANNOT_WRITE, ExitCode.CHECKPOINT_CORRUPT,
        ExitCode.NO_PERMISSION, ExitCode.NO_PROGRESS, ExitCode.STALLED, ExitCode.SUPERSEDED, ExitCode.BAD_RESULT,
        ExitCode.MACHINE, ExitCode.BAD_EXPORT, ExitCode.WRONG_KERNEL,
    }
)  # fmt: skip
"""Codes with a cause that a person can fix. They take precedence over codes that only report an end."""

WRONG_PATH = {
    errno.ENOENT: "no such file or folder",
    errno.ENOTDIR: "a file stands where a folder is expected",
    errno.EISDIR: "a folder stands where a file is expected",
}

PASSING = frozenset({ExitCode.UNAVAILABLE, ExitCode.CANNOT_WRITE, ExitCode.NO_PERMISSION})
"""Codes of what may work a minute later, without a new start."""

# Full disks in the errors of tokenizers, safetensors and torch.save, whose native code raises no OSError.
NO_SPACE_TEXT = re.compile(r"No space left on device|File too large|inline_container\.cc:\d+\] \. unexpected pos")
LONGEST_NAME_SHOWN = 300
UNEXPECTED_PREFIX = "unexpected error: "  # of the line after a traceback


class UserError(Exception):
    """A problem that the user can fix: what was found, what was expected and what to do.

    In a `found` of several lines, all but the first start with two spaces, by which log readers recognize them.

    `passes`: whether the same call may succeed later, without a new start: a service is away, a disk is full, a
    permission is missing. By default, the code says so.
    """

    def __init__(
        self,
        found: str,
        *,
        expected: str = "",
        fix: str = "",
        code: int = ExitCode.CONFIG,
        passes: bool | None = None,
    ) -> None:
        self.found, self.expected, self.fix, self.code = found, expected, fix, code
        self.passes = code in PASSING if passes is None else passes
        super().__init__(self.text())

    def text(self) -> str:
        """The message, one clause a line, without control characters."""
        lines = [self.found]
        if self.expected:
            lines.append(f"  expected: {_indented(self.expected)}")
        if self.fix:
            lines.append(f"  to do:    {_indented(self.fix)}")
        return printable("\n".join(lines))


def _indented(text: str) -> str:
    return text.replace("\n", "\n            ")


class ConfigError(UserError):
    """The run file, a parameter or a job spec is wrong (exit 64)."""


class DataError(UserError):
    """The data cannot be used as it is (exit 65)."""

    def __init__(self, found: str, *, expected: str = "", fix: str = "") -> None:
        super().__init__(found, expected=expected, fix=fix, code=ExitCode.DATA)


class MissingPackageError(UserError, ImportError):
    """A package that an extra brings is not installed (exit 69)."""

    def __init__(self, module: str, extra: str) -> None:
        fix = install_command(extra)
        problem = f"the Python package {module} is not installed"
        super().__init__(problem, expected=f"what vlmpipe[{extra}] brings", fix=fix, code=ExitCode.UNAVAILABLE)


@contextlib.contextmanager
def missing_packages() -> Iterator[None]:
    """Re-raise the lack of a package that an extra brings as a MissingPackageError. Also decorates functions."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if extra := extra_of(module):
            raise MissingPackageError(module, extra) from error
        raise


def require_package(module: str) -> None:
    """Raise MissingPackageError where a module is missing that a later process will import."""
    if importlib.util.find_spec(module) is None:
        raise MissingPackageError(module, extra_of(module))


def from_os_error(error: OSError, doing: str) -> UserError:
    """Translate an operating-system error, raised while `doing` something, with an exit code of its own."""
    named = str(error.filename or "")[:LONGEST_NAME_SHOWN]
    where = f": {named}" if named and not doing.endswith(named) else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(
            f"no space left while {doing}{where}",
            expected="enough free disk for the run's output and, in TMPDIR, for temporary files",
            fix="free space, or set TMPDIR to another disk; the same command then continues",
            code=ExitCode.CANNOT_WRITE,
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError(
            f"no permission while {doing}{where}",
            expected="a folder this user may write",
            fix="change the folder's permissions or set output.root_uri to another folder",
            code=ExitCode.NO_PERMISSION,
        )
    if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        return UserError(
            f"this file system cannot do what is needed ({error.strerror}) while {doing}{where}",
            expected="a local disk for what is not a run's output, with locks (flock)",
            fix="set TMPDIR and VLMPIPE_CACHE_DIR to folders of a local disk",
            code=ExitCode.CANNOT_WRITE,
        )
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return UserError(f"{os.strerror(error.errno).lower()} while {doing[:LONGEST_NAME_SHOWN]}{where}")
    if error.errno in WRONG_PATH:
        return UserError(f"{WRONG_PATH[error.errno]} while {doing}{where}", code=ExitCode.CONFIG)
    if error.errno == errno.EADDRINUSE:
        return UserError(
            f"port in use while {doing}{where}",
            fix="choose another port or leave it out to take a free one",
            code=ExitCode.UNAVAILABLE,
        )
    # Such as EIO, or ESTALE and ETIMEDOUT of a disk on the network.
    return UserError(f"{error.strerror or error} while {doing}{where}", code=ExitCode.UNEXPECTED, passes=True)


def from_unicode_error(error: UnicodeEncodeError, doing: str) -> UserError:
    """Translate the error of a name, of a file or a program, for which this Python's encoding has no bytes."""
    return UserError(
        f"this Python names files in {error.encoding}, which has no {error.object[error.start]!r}, while {doing}: "
        f"{error.object!a}",
        expected="a locale of UTF-8, such as C.UTF-8, or Python's UTF-8 mode",
        fix="set PYTHONUTF8=1, or LC_ALL=C.UTF-8",
    )


@contextlib.contextmanager
def os_errors(doing: str) -> Iterator[None]:
    """Re-raise an OSError inside the block, or native code's equivalent, as a UserError."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, doing) from error
    except UnicodeEncodeError as error:
        raise from_unicode_error(error, doing) from error
    except UserError:
        raise
    except Exception as error:
        if not NO_SPACE_TEXT.search(str(error)):
            raise
        raise from_os_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), doing) from error


def print_error(error: UserError) -> None:
    """Print to stderr, with the traceback if VLMPIPE_DEBUG is set."""
    _print_stderr(f"error: {error.text()}\n", with_traceback=bool(os.environ.get(DEBUG_VARIABLE)))


def print_warning(text: str, *, step: str = "train") -> None:
    """Print a warning to stderr; the job continues.

    Vertex AI takes a line's severity from its stream, whatever is in it: INFO from stdout, ERROR from stderr. So a
    filter on severity finds warnings and errors, and only those.
    """
    _print_stderr(f"{step}: warning: {text}\n", with_traceback=False)


def _print_stderr(text: str, *, with_traceback: bool) -> None:
    """Write in one piece, because ranks share the stream. A full disk must not change the exit code."""
    if with_traceback:
        text = traceback.format_exc() + text
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def run_main(main: Callable[[], int | None]) -> int:
    """Run a process's main function with secrets redacted; print its error and return the exit code.

    An unexpected error is printed with its traceback and a last line of its own.
    """
    with hiding_secrets():
        return _exit_code_of(main)


def _exit_code_of(main: Callable[[], int | None]) -> int:
    try:
        with missing_packages(), os_errors("running the job"):
            return int(main() or 0)
    except UserError as error:
        print_error(error)
        return int(error.code)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        _print_stderr(f"{UNEXPECTED_PREFIX}{type(error).__name__}: {first_line}\n", with_traceback=True)
        return int(ExitCode.UNEXPECTED)


def leave(code: int) -> NoReturn:
    """Write the exit code for the launcher and end this process at once. Callable from any thread."""
    if folder := os.environ.get(EXIT_FOLDER_VARIABLE):
        Path(folder, f"rank-{os.environ.get('RANK', 0)}").write_text(str(code), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
