"""Warnings about waits for data and idle GPUs, each with what helps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vlmpipe.trainer.monitoring.idle_watch import LINES, IdleWatch, Threads

HALF = Threads(4, 12)
ALL = Threads(12, 12)


def watch(
    threads: Threads = HALF, *, setting: int | str = 4, cached: bool = False, compiles: bool = False, frozen: str = ""
) -> IdleWatch:
    job: Any = SimpleNamespace(model=SimpleNamespace(frozen={frozen}), data=SimpleNamespace(loader_threads=setting))
    return IdleWatch(job, cached=cached, compiles=compiles, threads=lambda: threads)


def said(
    idle: IdleWatch, lines: int = LINES, *, wait: float = 0.0, stall: float = 0.0, gpu: float | None = None
) -> str:
    return "; ".join(text for _ in range(lines) for text in idle.note(wait, stall, gpu))


@pytest.mark.parametrize(
    ("idle", "remedy"),
    [
        (watch(), "raise data.loader_threads from 4 to 12"),
        (watch(ALL, frozen="tower"), "features.cache=on encodes each image once; or take a machine with more vCPUs"),
        (watch(setting="auto"), "auto) may take all its cores; take a machine with more vCPUs"),
        (watch(ALL), "(data.loader_threads) have all its cores; take a machine with more vCPUs"),
        (watch(cached=True), "raise data.shard_cache_gib"),
    ],
)
def test_waits_for_data_are_said_with_what_helps(idle: IdleWatch, remedy: str) -> None:
    text = said(idle, wait=0.34)
    assert "34% of the time training waits for data" in text and remedy in text


def test_a_pause_is_not_said_and_a_lasting_wait_is_said_once_each_time() -> None:
    idle = watch()
    assert not said(idle, LINES - 1, wait=0.5) and not said(idle, 1) and not said(idle, LINES - 1, wait=0.5)
    assert said(idle, 20, wait=0.5).count("waits for data") == 1
    said(idle, 1)
    assert said(idle, 20, wait=0.5).count("waits for data") == 1


@pytest.mark.parametrize(
    ("compiles", "remedy"),
    [(False, "train.compile=on, or a larger train.micro_batch_size"), (True, "not why: a larger")],
)
def test_idle_gpus_are_said_where_neither_data_nor_checkpoints_explain_them(compiles: bool, remedy: str) -> None:
    assert remedy in said(watch(compiles=compiles), gpu=41.0)
    assert not said(watch(), gpu=95.0) and not said(watch(), gpu=None)
    assert not said(watch(), gpu=41.0, stall=0.4)
    waits = said(watch(), gpu=41.0, wait=0.4)
    assert "waits for data" in waits and "kernel" not in waits
