"""Preparation of a million small records: does its time grow in line, and does its memory stay?

    python -m benchmarks.prepare_million                     20,000 beside 1,000,000 records (about an hour)
    python -m benchmarks.prepare_million --records 20000     2,000 beside 20,000

Each size is prepared in one process of its own (data.workers=1), since the peak of a process's memory never comes down.
The source is WebDataset tars of a tiny picture and a text of a few words, no two alike.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import Clock
from benchmarks.report import Report, Side
from benchmarks.workloads import job_of
from trainer.data.prepare.pipeline import prepare
from trainer.progress import Progress

TAR_RECORDS = 10_000
SMALLER = 0.02  # share of the records in the run that is compared with, though no fewer than
FEWEST = 2000
SIDE_PIXELS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--one", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)  # the process that is measured
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measure(chosen.one, chosen.records)))
        return
    few, many = max(FEWEST, int(SMALLER * chosen.records)), chosen.records
    found = {count: in_own_process(count) for count in (few, many)}
    report = Report("Preparation at size", {"records": many, "compared with": few})
    for count, result in found.items():
        report.require(result["accepted"] == count, "every record is accepted")
    sides = [f"{count:,} records" for count in (many, few)]
    for claim, name in (("records prepared in a CPU second", "per_cpu_s"), ("and in a second", "per_s")):
        values = [Side(label, [found[count][name]]) for label, count in zip(sides, (many, few), strict=True)]
        report.compare(claim, "tars of tiny pictures", "records", *values)
    # More is better in this table: what one byte of memory serves.
    memory = [Side(label, [found[count]["peak_mib"]]) for label, count in zip(sides, (many, few), strict=True)]
    report.compare("peak memory (a ratio of 1: it does not grow)", "tars of tiny pictures", "MiB", *memory)
    report.publish(chosen)


def in_own_process(records: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="vlmpipe-million-") as folder:
        write_tars(Path(folder, "set"), records)
        command = [sys.executable, "-m", "benchmarks.prepare_million", "--records", str(records), "--one", folder]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
        return found


def measure(folder: Path, records: int) -> dict[str, float]:
    """Prepare what is in `folder`, in this process."""
    job = job_of(
        "llava-local",
        folder / "root",
        "million",
        (f"data.source={folder / 'set'}", "data.image_folder=", "data.workers=1"),
    )
    progress = Progress(job.run.run_uri, "prepare-data", quiet=True)
    before_mib = peak_mib()
    clock = Clock()
    prepared = prepare(job, progress)
    used = clock.stop(records)
    return {
        "accepted": prepared.counts["accepted"],
        "per_cpu_s": 1 / used.cpu_per_unit,
        "per_s": 1 / used.wall_per_unit,
        "imported_mib": before_mib,
        "peak_mib": peak_mib(),
    }


def peak_mib() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB


def write_tars(folder: Path, records: int) -> None:
    folder.mkdir()
    for start in range(0, records, TAR_RECORDS):
        with tarfile.open(folder / f"{start // TAR_RECORDS:06d}.tar", "w") as tar:
            for number in range(start, min(records, start + TAR_RECORDS)):
                for suffix, data in (("png", tiny_png(number)), ("txt", text(number).encode())):
                    info = tarfile.TarInfo(f"{number:09d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def text(number: int) -> str:
    words = ("red", "green", "blue", "small", "large", "round", "square", "old", "new", "bright")
    return " ".join(words[int(digit)] for digit in str(number)) + f" thing, number {number}"


def tiny_png(number: int) -> bytes:
    """A grey picture whose first pixels spell the number (PNG, W3C, third edition)."""
    rows = number.to_bytes(8, "big").ljust(SIDE_PIXELS * SIDE_PIXELS, b"\x80")
    lines = b"".join(b"\0" + rows[at : at + SIDE_PIXELS] for at in range(0, len(rows), SIDE_PIXELS))
    header = SIDE_PIXELS.to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunks((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")))


def _chunks(*chunks: tuple[bytes, bytes]) -> Iterator[bytes]:
    for kind, data in chunks:
        yield len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


if __name__ == "__main__":
    main()
