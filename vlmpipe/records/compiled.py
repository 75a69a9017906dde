"""Settings that the step resolve-run gets from the compiled pipeline."""

from __future__ import annotations

import json

from pydantic import Field, JsonValue, ValidationError

from vlmpipe.trainer.records.record import Part, of_another_version

Parameter = str | int | float  # of a pipeline


class CompiledSettings(Part):
    """Settings that a pipeline was compiled with, which it holds as a constant.

    stage: the stage that the step resolve-run begins. fixed: values by stage of fields that no run can change.
    parameters: the defaults of the pipeline's. disks: GB of the steps' disks, by stage and step, where they are not the
    default.
    """

    target: str
    root_uri: str
    stage: str = ""
    stages: tuple[str, ...] = ("",)
    run_file: dict[str, JsonValue] = Field(default_factory=dict)
    fixed: dict[str, dict[str, JsonValue]]
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    disks: dict[str, dict[str, int]] = Field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> CompiledSettings:
        """Return the settings in the constant. Raises ConfigError for that of another version."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise of_another_version("the compiled pipeline", error) from error

    def text(self) -> str:
        return json.dumps(self.model_dump(), sort_keys=True)
