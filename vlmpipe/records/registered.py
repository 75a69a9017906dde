"""The registered version of a run's model: `registered.json`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from vlmpipe.trainer.errors import ExitCode, UserError
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

    def served_uri(self, form: str | None) -> str:
        """Address of what deploy.quantized names: the export of this format, or the model.

        Raises UserError (76) for a version without such an export.
        """
        if form is None:
            return self.uri
        if form not in self.quantized:
            raise UserError(
                f"version {self.version} of {self.model} has no {form} export: the evaluation refused it or could not "
                "make it, or the version was registered before it was asked for",
                expected=f"an {form} export that answers as the model (evaluate.json says why there is none)",
                fix="set deploy.quantized to null, which serves the model, or to another format",
                code=ExitCode.REJECTED,
            )
        return self.quantized[form]
