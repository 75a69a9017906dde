"""Entry point of the `vlmpipe` command: names a missing package in a sentence, before it is imported."""

import codecs
import locale
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from vlmpipe.trainer.confinement import LIMITS_VARIABLE
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.extras import install_command

UTF8_VARIABLE = "PYTHONUTF8"
OUTPUT_VARIABLE = "PYTHONIOENCODING"


def console() -> None:
    """Run the command line. Exits with 69 where a package that it needs is missing, with 130 after Ctrl-C.

    Once the exit code is known, one more Ctrl-C does not replace it. After 130 it ends the process at once: Python
    waits for its threads, and one may be in a long transfer.
    """
    more: Callable[..., None] | signal.Handlers = signal.SIG_IGN
    try:
        _run()
    except SystemExit as leaving:
        if leaving.code == ExitCode.INTERRUPTED:
            more = _end_now
        raise
    finally:
        signal.signal(signal.SIGINT, more)


def _run() -> None:
    try:
        _take_closed_handles()
        if needs_utf8_mode():
            _start_again_in_utf8_mode()
        _hold_to_limits()
        _command_line()()
    except KeyboardInterrupt:  # before the command line is there, or after it
        _leave(["stopped by Ctrl-C"], ExitCode.INTERRUPTED)


def _hold_to_limits() -> None:
    """Hold a command of `vlmpipe mcp` to its folders before it imports, and so before it has threads."""
    if LIMITS_VARIABLE not in os.environ:
        return
    from vlmpipe.cli.output import print_error
    from vlmpipe.trainer.confinement.landlock import restrict_files
    from vlmpipe.trainer.confinement.limits import limits
    from vlmpipe.trainer.errors import UserError

    try:
        if (held := limits()) and held.is_enforced:
            restrict_files(writable=(held.root, *held.writable), readable=held.readable)
    except UserError as error:
        print_error(error, as_json=True)
        sys.exit(int(error.code))


def _end_now(*_: object) -> None:
    os._exit(ExitCode.INTERRUPTED)


def _command_line() -> Callable[[], None]:
    try:
        from vlmpipe.cli.app import console as run
    except ModuleNotFoundError as error:
        extras = "vlmpipe with pipelines (the command line), trainer and data (runs on this machine)"
        needed = install_command("pipelines,trainer,data")
        problem = f"error: the Python package {error.name} is not installed"
        _leave([problem, f"  expected: {extras}", f"  to do:    {needed}"], ExitCode.UNAVAILABLE)
    return run


def needs_utf8_mode() -> bool:
    """Return whether names of files would be read and written in the locale's encoding, which is not UTF-8.

    Under ISO-8859-1, Python cannot name a file of Chinese characters, and reads the name of one as others. In its UTF-8
    mode (PEP 540; from Python 3.15 on always, PEP 686) names are UTF-8, and any other bytes are kept. A user's own
    choice, PYTHONUTF8=0, is left to him.
    """
    is_utf8 = codecs.lookup(locale.getencoding()).name == "utf-8"
    return not (is_utf8 or sys.flags.utf8_mode or UTF8_VARIABLE in os.environ)


def _start_again_in_utf8_mode() -> None:
    """Replace this process by itself in UTF-8 mode: it cannot be switched on later. A terminal keeps its encoding."""
    environment = {**os.environ, UTF8_VARIABLE: "1"}
    if sys.stdout is not None and sys.stdout.isatty():
        environment.setdefault(OUTPUT_VARIABLE, f"{sys.stdout.encoding}:replace")
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _take_closed_handles() -> None:
    """Open the null device where stdin, stdout or stderr was closed (`>&-`): the next file would take its number."""
    for handle in (0, 1, 2):
        try:
            os.fstat(handle)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


def _leave(lines: Sequence[str], code: int) -> NoReturn:
    print("\n".join(lines), file=sys.stderr)
    raise SystemExit(code)
