"""Time of comparing two runs of 10,000 questions each, with its page: python -m benchmarks.comparison

The answers are generated: four slices, five questions a sample, of which each run answers most right, and its own ones
wrong. The pictures that the page would show are left out.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from trainer.storage import open_storage
from trainer.storage.records import seal_lines, write_record
from vlmpipe.compare.compare import compare
from vlmpipe.compare.page import build_page
from vlmpipe.compare.sides import read_sides

QUESTIONS, TURNS = 10_000, 5
SLICES = ("colour", "count", "object", "text")
WORDS = ("red", "blue", "a small dog", "two", "the left one", "1,000", "Main Street", "none")


def write_run(folder: Path, seed: int) -> None:
    """A run's records, with answers that a wrong letter or another word makes wrong."""
    draw = random.Random(seed)
    lines = []
    for number in range(QUESTIONS):
        answer = WORDS[number % len(WORDS)]
        said = answer if draw.random() < 0.7 else draw.choice([*WORDS, answer[:-1] + "x"])
        place = {"id": f"sample-{number // TURNS:06}", "turn": number % TURNS, "slice": SLICES[number % len(SLICES)]}
        texts = {"question": f"What is number {number}?", "answer": answer, "prediction": said}
        lines.append(place | texts | {"correct": said == answer})
    store = open_storage(str(folder))
    store.write("predictions.jsonl", seal_lines(lines))
    for name, record in {
        "run.json": {"name": folder.name},
        "evaluate.json": {"questions": QUESTIONS},
        "prepared.json": {"prepared_uri": str(folder / "none")},
    }.items():
        write_record(store, name, record)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        folders = [Path(scratch, name) for name in ("before", "after")]
        for seed, folder in enumerate(folders):
            write_run(folder, seed)
        times = [clock()]
        sides = read_sides([str(folder) for folder in folders], scratch)
        times.append(clock())
        found = compare(sides)
        times.append(clock())
        page = build_page(found)
        times.append(clock())
    print(f"{found.questions:,} questions of {len(sides)} runs, {len(found.disagreements):,} disagreements")
    parts = [*zip(("read", "compare", "page"), times, times[1:], strict=False), ("whole", times[0], times[-1])]
    for name, before, after in parts:
        print(f"{name:8} {after[0] - before[0]:.2f} s, {after[1] - before[1]:.2f} s of CPU time")
    print(f"the page has {len(page):,} bytes")


def clock() -> tuple[float, float]:
    """Wall and CPU time, in seconds."""
    return time.perf_counter(), time.process_time()


if __name__ == "__main__":
    main()
