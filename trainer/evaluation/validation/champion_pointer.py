"""The model in use when a run is evaluated: written by the step sync-checkpoint, read by the job evaluate."""

from __future__ import annotations

from pydantic import Field

from vlmpipe.trainer.config.base import Section
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_record

CHAMPION_FILE = "champion.json"


class ChampionPointer(Section):
    """The model in use when this run's model was exported."""

    version: int
    run_id: str
    run_uri: str
    checkpoint: str = Field(description="Checkpoint that the registered export was made from.")


def champion_of(run: Storage) -> ChampionPointer | None:
    """The model in use, of a run's folder; None if there was none."""
    if run.stat(CHAMPION_FILE) is None:
        return None
    return ChampionPointer.model_validate(read_record(run, CHAMPION_FILE))
