"""Part `turns`: CPU time of preparing a turn, in conversations of 128 turns and in ordinary ones about an image."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

from benchmarks.data.pictures import photographs
from benchmarks.data.preparation import tiny_job
from benchmarks.data.tiny_records import text
from benchmarks.support.suite import Bench
from benchmarks.support.timing import Measured, clocked
from benchmarks.support.workloads import prepare_job
from vlmpipe.trainer.config.job import JobConfig

TURNS, ORDINARY_TURNS = 128, 7  # of a record; those of LLaVA-1.5's mix have 7 in the mean
MAX_RATIO = 3.0  # CPU time of a turn, many to a record beside ordinary ones
POLICIES = {  # how long conversations fit: all of it, or up to the last turn that does
    "that fit": ("data.sequence_length=16384", "model.language_model.config.max_position_embeddings=16384"),
    "that are cut": ("data.sequence_length=1024", "data.overlong_policy=truncate"),
}


def turns(bench: Bench) -> None:
    """The same number of turns as long and as ordinary conversations, each record with an image of its own."""
    count = 1_000 if bench.quick else 16_000
    bench.expect(len(POLICIES))
    root = bench.scratch / "turns"
    sides = {"many": TURNS, "ordinary": ORDINARY_TURNS}
    for name, of_record in sides.items():
        write_conversations(root / name, count // of_record, of_record)
    for policy, overrides in POLICIES.items():
        jobs = {
            name: tiny_job(root / name / "set.jsonl", root / "root", "data.workers=1", *overrides) for name in sides
        }
        works = {name: partial(_prepared, jobs[name], root / "root", count) for name in sides}
        found = bench.take_turns(f"conversations {policy}", works)
        pair = (f"{TURNS} turns a record", found["many"]), (f"{ORDINARY_TURNS} turns a record", found["ordinary"])
        bench.report.compare_rates("preparing turns", f"conversations {policy}", "turns", *pair)
        many, ordinary = (min(each.cpu_per_unit for each in found[name]) for name in sides)
        ratio = many / ordinary
        bench.report.require(ratio <= MAX_RATIO, f"a turn takes at most {MAX_RATIO:g} times", found=f"{ratio:.2f}")


def write_conversations(folder: Path, records: int, of_record: int) -> None:
    """Records in LLaVA's format, each with another image."""
    folder.mkdir(parents=True)
    images = photographs(min(records, 64))
    with (folder / "set.jsonl").open("w", encoding="utf-8") as file:
        for number in range(records):
            # Bytes behind the end of an image make it another file with the same pixels.
            (folder / f"{number}.jpg").write_bytes(images[number % len(images)] + str(number).encode())
            said = [
                {"from": speaker, "value": ("<image>\n" if (speaker, turn) == ("human", 0) else "") + text(turn + salt)}
                for turn in range(of_record)
                for speaker, salt in (("human", number), ("gpt", 2 * number))
            ]
            file.write(json.dumps({"id": number, "image": f"{number}.jpg", "conversations": said}) + "\n")


def _prepared(job: JobConfig, root: Path, count: int) -> Measured:
    """Prepare under `root` and remove it. Units: turns that the records have."""

    def work() -> float:
        prepare_job(job)
        return count

    measured = clocked(work)
    shutil.rmtree(root)
    return measured
