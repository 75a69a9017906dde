"""Signal handlers that hold for a block."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let `handler` take these signals inside the block.

    In another thread than the main one, which alone gets signals in Python, nothing is changed: whoever runs the main
    thread, such as a web server, has handlers of its own.
    """
    here = in_main_thread()
    before = {number: signal.signal(number, handler) for number in numbers} if here else {}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
