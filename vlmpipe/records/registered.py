"""The registered version of a run's model: `registered.json`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from vlmpipe.trainer.records.record import Part, Record


class Uploaded(Part):
    """The commit of the hub that holds the model."""

    repo_id: str
    revision: str
    commit: str


class Registered(Record):
    """A version in the registry. `resource` is its name on Vertex AI, where the registry is there.

    quantized: addresses of its quantized exports, by format.
    """

    FILE: ClassVar[str] = "registered.json"
    STEP: ClassVar[str] = "register-model"
    IS_SPARSE: ClassVar[bool] = True

    model: str
    version: int
    uri: str = ""
    alias: str = ""
    resource: str = ""
    quantized: dict[str, str] = Field(default_factory=dict)
    hub: Uploaded | None = None
