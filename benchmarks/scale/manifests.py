"""Part `manifest`: opening, listing and verifying prepared data of many shards, by its list of files in pages."""

from __future__ import annotations

import resource
import time
from itertools import islice
from pathlib import Path

from benchmarks.scale.private_memory import private_mib
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.data.shards.prepared_files import DONE, FORMAT, Manifest, PreparedFiles
from vlmpipe.trainer.data.shards.tar import shard_name
from vlmpipe.trainer.data.shards.verified_files import sidecar_name
from vlmpipe.trainer.storage.file_sums import FileSum, damaged_files
from vlmpipe.trainer.storage.local import LocalStorage

SHARDS = 100_000
CONTENT = b"shard"
LOOKED_UP = 100
SIDES = {"in pages": True, "in one piece": False}


def manifest(bench: Bench) -> None:
    """Two files a shard, as a folder has them; beside the same list in one piece, as short lists are kept."""
    shards = SHARDS // (100 if bench.quick else 1)
    folder = bench.scratch / "set"
    bench.at(f"writing {2 * shards:,} files")
    _write(folder, shards)
    data = f"{shards:,} shards, {2 * shards:,} files"
    for side, in_pages in SIDES.items():
        bench.at(f"reading it {side}")
        bench.call(f"{__name__}:write_manifest", {"folder": str(folder), "in_pages": in_pages})
        found = bench.call(f"{__name__}:measured", {"folder": str(folder)})
        bench.report.require(found["files"] == 2 * shards and not found["damaged"], "every file is found whole")
        for claim, unit, name in (
            ("opened", "CPU s", "open_s"),
            ("private memory, opened", "MiB", "open_mib"),
            (f"a file looked up, of {LOOKED_UP}", "CPU ms", "lookup_ms"),
            ("listed", "CPU s", "list_s"),
            ("every file verified", "CPU s", "verify_s"),
            ("peak memory of listing and verifying", "MiB", "peak_mib"),
        ):
            bench.report.figure(f"{claim}, {side}", data, unit, Side(side, [found[name]]))


def _write(folder: Path, shards: int) -> None:
    (folder / "shards").mkdir(parents=True)
    for number in range(shards):
        name = shard_name("train", number)
        for file in (name, sidecar_name(name)):
            (folder / file).write_bytes(CONTENT)


def write_manifest(folder: str, in_pages: bool) -> None:
    store, place = LocalStorage(folder), Path(folder)
    sums = FileSum.of(next((place / "shards").iterdir()))
    listed = Manifest(FORMAT, "f", {}, {f"shards/{path.name}": sums for path in (place / "shards").iterdir()})
    (place / DONE).write_bytes((listed.in_pages(store) if in_pages else listed).to_bytes())


def measured(folder: str) -> dict[str, float]:
    """Read the manifest as a rank, `status` and prepare_data do."""
    store = LocalStorage(folder)
    names = [f"shards/{path.name}" for path in islice((store.root / "shards").iterdir(), LOOKED_UP)]
    before, began = private_mib(), time.process_time()
    prepared = PreparedFiles(store)
    found = {"open_s": time.process_time() - began, "open_mib": private_mib() - before}
    began = time.process_time()
    for name in names:
        prepared.read(name)
    found["lookup_ms"] = 1000 * (time.process_time() - began) / len(names)
    start_mib, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.process_time()
    found["files"] = len(prepared.list())
    found["list_s"], began = time.process_time() - began, time.process_time()
    found["damaged"] = len(damaged_files(store, Manifest.read(store).files))
    found["verify_s"] = time.process_time() - began
    found["peak_mib"] = max(0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - start_mib)
    return found
