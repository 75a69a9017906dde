"""Threads of the trainer have the CUDA device of the thread that starts them."""

from __future__ import annotations

import ast
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.cuda import CudaDevices
from tests.support.paths import ROOT
from vlmpipe.trainer.storage.transfer import in_parallel
from vlmpipe.trainer.threads import start_thread, start_timer, thread_pool

LOCAL_RANK = 3
STARTED_BY = "trainer/threads.py"
# Each makes threads, some of them only when it is called on.
STARTERS = {
    "Thread",
    "Timer",
    "ThreadPool",
    "ThreadPoolExecutor",
    "ThreadingHTTPServer",
    "ThreadingMixIn",
    "start_new_thread",
    "to_thread",
    "run_in_executor",
}


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> CudaDevices:
    return CudaDevices.install(monkeypatch, device=LOCAL_RANK)


def by_thread(action: Callable[[], object]) -> None:
    start_thread(action, name="test").join()


def by_timer(action: Callable[[], object]) -> None:
    start_timer(0.0, action).join()


def by_pool(action: Callable[[], object]) -> None:
    with thread_pool(1, name="test") as pool:
        pool.submit(action).result()


def by_transfers(action: Callable[[], object]) -> None:
    list(in_parallel(lambda _: action(), [None]))


WAYS = [by_thread, by_timer, by_pool, by_transfers]


@pytest.mark.parametrize("start", WAYS)
def test_a_thread_has_the_device_of_its_starter(start: Callable[..., None], devices: CudaDevices) -> None:
    found: queue.SimpleQueue[int] = queue.SimpleQueue()
    start(lambda: found.put(torch.cuda.current_device()))
    by_thread(lambda: start(lambda: found.put(torch.cuda.current_device())))  # of a thread's own threads too
    assert [found.get(), found.get()] == [LOCAL_RANK, LOCAL_RANK]


def test_a_thread_started_otherwise_has_device_0(devices: CudaDevices) -> None:
    found: queue.SimpleQueue[int] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: found.put(torch.cuda.current_device()))
    thread.start()
    thread.join()
    assert found.get() == 0


@pytest.mark.parametrize("failing", ["current_device", "set_device"])
@pytest.mark.parametrize("start", WAYS)
def test_threads_start_though_the_gpu_has_failed(
    start: Callable[..., None], failing: str, devices: CudaDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, failing, fail)
    called = threading.Event()
    start(called.set)
    assert called.is_set()


def starters_in(path: Path) -> Iterator[str]:
    """Names of what a module calls or derives from to start threads."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if any(name in text for name in STARTERS) else ():
        called = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        for name in called:
            last = name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")
            if last in STARTERS:
                yield last


def test_threads_are_started_in_one_module() -> None:
    modules = [path for path in (ROOT / "trainer").rglob("*.py") if path != ROOT / STARTED_BY]
    found = {f"{path.relative_to(ROOT)}: {name}" for path in modules for name in starters_in(path)}
    assert found == set(), f"start threads by {STARTED_BY}: others are on GPU 0"


@pytest.mark.parametrize(
    "line",
    [
        "threading.Thread(target=print).start()",
        "Timer(1, print)",
        "class Own(threading.Thread): pass",
        "concurrent.futures.ThreadPoolExecutor()",
        "asyncio.to_thread(print)",
    ],
)
def test_the_law_sees_every_way_to_start_one(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert len(list(starters_in(tmp_path / "module.py"))) == 1
