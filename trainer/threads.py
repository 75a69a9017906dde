"""Starts every thread of the trainer, on the CUDA device of the thread that starts it.

CUDA's current device belongs to a thread, and a new thread's is GPU 0 whatever its starter's is (CUDA C++ Programming
Guide, "Device Selection"). On a machine with several GPUs, a call there that waits for a stream or pins memory opens a
context of 0.3 to 0.6 GB on GPU 0, in every process, and GPU 0 is soon out of memory. Torch's writer of checkpoints, for
one, waits for a stream though all that it writes is in host memory.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def start_thread(target: Callable[[], object], *, name: str) -> threading.Thread:
    """A running daemon thread."""
    take_device = _device_taker()

    def run() -> None:
        take_device()
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def start_timer(seconds: float, action: Callable[[], object]) -> threading.Timer:
    """A running daemon thread that calls `action` after `seconds`, unless it is canceled."""
    take_device = _device_taker()

    def run() -> None:
        take_device()
        action()

    timer = threading.Timer(seconds, run)
    timer.daemon = True
    timer.start()
    return timer


def thread_pool(threads: int, *, name: str) -> ThreadPoolExecutor:
    """A pool of threads, which start when they are first needed."""
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_device_taker())


def _device_taker() -> Callable[[], None]:
    """Makes the device of the thread that calls this that of the thread that calls the result.

    Imports no torch: a process without it, or that has not begun to use CUDA, has no device to take.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return lambda: None
    with contextlib.suppress(RuntimeError):
        device = torch.cuda.current_device()
        return lambda: _take(device)
    return lambda: None


def _take(device: int) -> None:
    """Select the GPU for this thread. Ignores a GPU that has failed: the watchdog and the error report need threads."""
    with contextlib.suppress(RuntimeError):
        sys.modules["torch"].cuda.set_device(device)
