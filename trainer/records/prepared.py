"""Where a run's prepared data and features are: `prepared.json`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from vlmpipe.trainer.records.record import Record

CHANGES_FILE = "data_changes.json"  # differences from the data that the run file prepared before


class DataPointers(Record):
    """Addresses that the step prepare-data hands to the jobs."""

    FILE: ClassVar[str] = "prepared.json"
    STEP: ClassVar[str] = "prepare-data"

    prepared_uri: str = Field(description="Prepared data of this run.")
    features_uri: str = Field(description="Feature store of this run's tower; may be empty where features are off.")
    features: Literal["encode", "reuse", "off"] = Field(
        description="Whether features are used, and if any are missing."
    )
