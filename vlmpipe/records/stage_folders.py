"""The folders of a run's stages, and the names of their fields. Read by every command about runs, so without the run
file's sections, which take a quarter of a second to import.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.records.step import read_step, step_file
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage

FIRST_STEP = "resolve-run"
STAGES_FOLDER = "stages"  # in the run's folder; the last stage is the run itself


def stage_run_id(run_id: str, stage: str, stages: Sequence[str]) -> str:
    """The id of a stage's run, whose folder is inside that of the whole run. The last stage is the run itself."""
    return run_id if stage == stages[-1] else f"{run_id}/{STAGES_FOLDER}/{stage}"


def earlier_stages(run_uri: str) -> dict[str, str]:
    """The folders of the stages before the last one that have begun, by name, in order; none without stages."""
    store = open_storage(run_uri)
    names = [info.name for info in store.list(STAGES_FOLDER) if info.name.endswith(f"/{step_file(FIRST_STEP)}")]
    stages = [name.split("/")[1] for name in names]
    began_s = {stage: _began_s(open_storage(store.uri(f"{STAGES_FOLDER}/{stage}"))) for stage in stages}
    return {stage: store.uri(f"{STAGES_FOLDER}/{stage}") for stage in sorted(began_s, key=began_s.__getitem__)}


def _began_s(stage: Storage) -> float:
    with contextlib.suppress(UserError):
        record = read_step(stage, FIRST_STEP)
        return record.started_s if record else 0.0
    return 0.0


def path_in(stage: str, field: str) -> str:
    """The dotted path of a stage's own value of a field of the run file."""
    return f"stages.{stage}.{'freeze' if field == 'model.freeze' else field}"
