"""The folders of a local run's stages."""

from __future__ import annotations

import contextlib
from pathlib import Path

from vlmpipe.records.stage_folders import STAGES_FOLDER, earlier_stages
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage.records import read_record_file

RUN_FILE_COPY = "run_file.json"


def stage_folders(folder: Path) -> dict[str, Path]:
    """The folders of a run's stages by their names, in order; without stages its own, under an empty name."""
    names: list[str] = []
    with contextlib.suppress(UserError):
        names = [str(stage["name"]) for stage in read_record_file(folder / RUN_FILE_COPY).get("stages") or ()]
    if not names:  # also of a downloaded folder, which has no copy of the run file: the last one's name is not known
        names = [*earlier_stages(str(folder)), ""]
    return {name: folder / STAGES_FOLDER / name for name in names[:-1]} | {names[-1]: folder}


def is_sweep(folder: Path) -> bool:
    """Return whether the run's last stage is a sweep."""
    with contextlib.suppress(UserError):
        return bool(read_record_file(folder / RUN_FILE_COPY).get("sweep"))
    return False
