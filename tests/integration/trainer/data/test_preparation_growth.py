"""No step of preparation takes time quadratic in chunks, shards, sources or turns, by counted calls of functions."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.data.chunks import fixed_tokenizer, progress_of
from tests.support.data.prepared import conversation, job_config
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.prepare.pipeline import plan_chunks, prepare, prepare_share

COUNT, TASKS = 2, 2
MOST_GROWTH = 3.0  # from twice to four times as many, beside that before: 2 where calls are linear, 4 where quadratic
# Calls to write progress depend on time, those of the standard library and of numpy on what is in their caches.
COUNTED = ("/trainer/data/", "/trainer/config/", "/trainer/storage/")


def of(number: int, turns: int = 1) -> dict[str, Any]:
    texts = [text for turn in range(turns) for text in (f"What is {number} and {turn}?", f"It is {number} {turn}.")]
    return {"id": f"record-{number}", "conversations": conversation(*texts)}


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def many_chunks(folder: Path, count: int) -> dict[str, Any]:
    return {"source": write(folder / "set.jsonl", [of(n) for n in range(2 * count)]), "chunk_samples": 2}


def many_shards(folder: Path, count: int) -> dict[str, Any]:
    return {"source": write(folder / "set.jsonl", [of(n) for n in range(count)]), "shard_samples": 1}


def many_sources(folder: Path, count: int) -> dict[str, Any]:
    files = [write(folder / f"{n}.jsonl", [of(2 * n), of(2 * n + 1)]) for n in range(count)]
    return {"sources": [{"name": f"source{n}", "uri": uri} for n, uri in enumerate(files)], "chunk_samples": 2}


def many_turns(folder: Path, count: int) -> dict[str, Any]:
    records = [of(0, turns=8 * count), *(of(n) for n in range(1, 8))]
    return {"source": write(folder / "set.jsonl", records), "sequence_length": 1 << 16}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(many_chunks, marks=pytest.mark.slow),
        pytest.param(many_shards, marks=pytest.mark.slow),
        many_sources,
        many_turns,
    ],
)
def test_twice_as_many_take_at_most_twice_the_calls(
    settings: Callable[[Path, int], dict[str, Any]], memory: Path
) -> None:
    tokenizer = fixed_tokenizer(memory / "tokenizer")
    counted = []
    for count in (1, COUNT, 2 * COUNT, 4 * COUNT):  # the first one fills caches
        folder = memory / str(count)
        folder.mkdir()
        data = {"image_folder": "", "workers": 1, "validation_fraction": 0.0} | settings(folder, count)
        counted.append(calls(job_config(folder / "root", tokenizer=tokenizer, **data)))
    _, few, more, most = counted
    few_calls = COUNT**2 * 4  # a third of what calls for each pair grow by
    assert sum(most.values()) > sum(more.values()) > sum(few.values()) > 1_000
    grown = {name: (more[name] - few[name], most[name] - more[name]) for name in most}
    assert not {name: pair for name, pair in grown.items() if pair[1] > max(MOST_GROWTH * pair[0], few_calls)}


def calls(config: JobConfig) -> Counter[str]:
    """How often planning, each task and the merge call each function."""
    found = Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and any(place in frame.f_code.co_filename for place in COUNTED):
            found[f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno} {frame.f_code.co_name}"] += 1

    gc.disable()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        progress = progress_of(config)
        fingerprint = plan_chunks(config, progress).fingerprint
        for task in range(TASKS):
            prepare_share(config, fingerprint, task, TASKS, progress)
        prepare(config, progress)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()
    return found
