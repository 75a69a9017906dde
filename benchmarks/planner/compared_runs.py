"""Two runs of 10,000 questions each to compare: python -m benchmarks.planner.compared_runs FOLDER

Their answers are generated: four slices, five questions a sample, of which each run answers about 70 % right. The
prepared data that they name is not there, so a page of their comparison shows no pictures.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import seal_lines, write_record

QUESTIONS, TURNS = 10_000, 5
SLICES = ("colour", "count", "object", "text")
WORDS = ("red", "blue", "a small dog", "two", "the left one", "1,000", "Main Street", "none")


def write_runs(folder: Path) -> list[str]:
    """Write them below `folder`. Returns their folders."""
    runs = [folder / name for name in ("before", "after")]
    for seed, run in enumerate(runs):
        _write_run(run, seed)
    return list(map(str, runs))


def _write_run(run: Path, seed: int) -> None:
    """A run's records. A wrong answer is another word, or has a wrong letter."""
    draw = random.Random(seed)
    lines = []
    for number in range(QUESTIONS):
        answer = WORDS[number % len(WORDS)]
        said = answer if draw.random() < 0.7 else draw.choice([*WORDS, answer[:-1] + "x"])
        place = {"id": f"sample-{number // TURNS:06}", "turn": number % TURNS, "slice": SLICES[number % len(SLICES)]}
        texts = {"question": f"What is number {number}?", "answer": answer, "prediction": said}
        lines.append(place | texts | {"correct": said == answer})
    store = open_storage(str(run))
    store.write("predictions.jsonl", seal_lines(lines))
    write_record(store, "run.json", {"name": run.name})
    write_record(store, "evaluate.json", {"questions": QUESTIONS})
    write_record(store, "prepared.json", {"prepared_uri": str(run), "features_uri": "", "features": "off"})


if __name__ == "__main__":
    print(*write_runs(Path(sys.argv[1])))
