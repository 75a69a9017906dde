"""An output folder with as many runs as wanted, each a copy of one real run with another name, time and outcome.

Records are written for each run; checkpoints, logs and the export are hard links of the original's files.
"""

from __future__ import annotations

import json
import os
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from vlmpipe.inventory.tags import TAGS
from vlmpipe.records.registered import Registered
from vlmpipe.runs.folders.marker import MARKER
from vlmpipe.runs.folders.stages import RUN_FILE_COPY
from vlmpipe.trainer.storage.records import seal, unseal

FIRST, APART = datetime(2026, 1, 1), timedelta(minutes=7)
NUM_NAMES = 20  # run files
EXIT_CODES = {3: 1, 7: None, 8: 65}  # by the last digit of a run's number; the others are done
REGISTERED_EVERY, TAGGED_EVERY = 10, 97


def write_runs(original: Path, root: Path, count: int) -> list[str]:
    """Write `count` runs of `original` under `root`. Returns their ids, oldest first."""
    records, others = dict[str, str](), list[str]()
    for path in sorted(path for path in original.rglob("*") if path.is_file()):
        name = path.relative_to(original).as_posix()
        if path.suffix == ".json" and path.parent in (original, original / "steps", original / "usage"):
            text = json.dumps(unseal(path.read_bytes()))
            records[name] = text.replace(str(original.parents[1]), str(root))
        else:
            others.append(name)
    folders = sorted({os.path.dirname(name) for name in (*records, *others)})
    for kind in ("prepared", "features"):
        shutil.copytree(original.parents[1] / kind, root / kind, copy_function=os.link)
    ids = []
    for number in range(count):
        at, run_file = FIRST + number * APART, f"digits-{number % NUM_NAMES:02d}"
        ids.append(f"{run_file}-{at:%Y%m%d-%H%M%S}")
        folder = root / "runs" / ids[-1]
        for name in folders:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name in others:
            os.link(original / name, folder / name)
        shift_s = at.timestamp() - unseal((original / MARKER).read_bytes())["started_s"]
        for name, text in records.items():
            if record := _changed(name, json.loads(text.replace(original.name, ids[-1])), number, run_file, shift_s):
                (folder / name).write_bytes(seal(record, indent=1))
        if number % TAGGED_EVERY == 0:
            (folder / TAGS).write_bytes(seal({"tags": ["baseline"]}))
    return ids


def _changed(name: str, record: dict[str, Any], number: int, run_file: str, shift_s: float) -> dict[str, Any]:
    """The record of this run; empty where the run has none."""
    record |= {field: record[field] + shift_s for field in ("started_s", "ended_s") if record.get(field)}
    is_registered = number % REGISTERED_EVERY == 0
    if name == MARKER:
        record |= {"exit_code": EXIT_CODES.get(number % 10, 0), "name": run_file}
    elif name == RUN_FILE_COPY:
        record["name"] = run_file
    elif name == Registered.FILE:
        return record | {"version": 1 + number // REGISTERED_EVERY} if is_registered else {}
    elif name == "decision.json":
        record["accepted"] = is_registered
    return record
