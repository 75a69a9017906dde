"""The sections of the run file.

Those that jobs read are in `vlmpipe.trainer.config`, the others in `vlmpipe.config.sections`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, field_validator

from vlmpipe.config.run_references import with_exports
from vlmpipe.config.sections.cluster import ClusterConfig
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.config.sections.gcp import GcpConfig
from vlmpipe.config.sections.kubeflow import KubeflowConfig
from vlmpipe.config.sections.notify import NotifyConfig
from vlmpipe.config.sections.output import GateConfig, OutputConfig, RegisterConfig
from vlmpipe.config.sections.plan import PlanConfig
from vlmpipe.config.sections.schedule import ScheduleConfig
from vlmpipe.config.sections.stages import StageConfig, stage_contents, with_overrides
from vlmpipe.config.sections.sweep import SweepConfig, Variant
from vlmpipe.config.sections.tune import TuneConfig
from vlmpipe.config.validation_errors import (
    Problem,
    ProblemsError,
    RunFileError,
    closest_field,
    from_validation_error,
    show,
)
from vlmpipe.trainer.config.base import Section
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.job import JobSections, RunPaths, Secrets

BUILTIN_SOURCES = (
    "builtin:digits", "builtin:digit-mosaics", "builtin:digit-mosaic-questions", "builtin:easy-vqa", "builtin:openmoji",
)  # fmt: skip


def _known_source(data: DataConfig) -> DataConfig:
    problems = []
    for field, uri in data.addresses().items():
        if uri.startswith("builtin:") and uri not in BUILTIN_SOURCES:
            closest = closest_field(uri, BUILTIN_SOURCES)
            hint = f"; did you mean {closest}?" if closest else ""
            text = f"found {show(uri)}, expected one of {', '.join(BUILTIN_SOURCES)}{hint}"
            problems.append(Problem(field, text))
    if problems:
        raise ProblemsError(problems)
    return data


def _or_none(schema: dict[str, Any]) -> None:
    """Let editors take `gate: none` beside the section."""
    if "$ref" in schema:
        schema["anyOf"] = [{"$ref": schema.pop("$ref")}, {"const": "none"}]


class RunFields(JobSections, Section):
    """The sections of a run file, without the rules between them: those are in `vlmpipe.config.rules`."""

    model_config = ConfigDict(populate_by_name=True)

    name: str = Field(
        pattern=r"^[a-z][a-z0-9-]{2,61}[a-z0-9]$",
        description="Name of the run file's runs: lower case, digits, dashes.",
    )
    data: Annotated[DataConfig, AfterValidator(_known_source)] = Field(description="Where samples come from.")
    output: OutputConfig = Field(default_factory=OutputConfig, description="Where everything is written.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="The machines of the jobs.")
    secrets: Secrets = Field(
        default_factory=dict,
        description="Secret environment variables of the jobs: each name with a Secret Manager secret, "
        "projects/PROJECT/secrets/NAME/versions/VERSION, read when a container starts. A variable that is already set "
        "is kept.",
    )
    gate: GateConfig = Field(
        default_factory=GateConfig,
        description="The conditions for registering a model; none accepts every model.",
        json_schema_extra=_or_none,
    )
    # `register` would hide a method that pydantic's models have from abc.ABCMeta.
    register_: RegisterConfig = Field(
        default_factory=RegisterConfig, alias="register", description="How an accepted model is registered."
    )
    deploy: DeployConfig | None = Field(None, description="How the registered model is served; null for no deployment.")
    stages: tuple[StageConfig, ...] = Field(
        (),
        description="Consecutive trainings, each from the model of the one before and with values that replace the "
        "run file's; empty trains the run file itself.",
    )
    schedule: ScheduleConfig | None = Field(None, description="Recurring runs on Vertex AI or Kubeflow; null for none.")
    tune: TuneConfig | None = Field(None, description="A search over fields of train and adapters; null for none.")
    sweep: SweepConfig | None = Field(
        None,
        description="Variants of the run that are trained and compared; null for none. No model of a sweep is "
        "registered.",
    )
    notify: NotifyConfig = Field(default_factory=NotifyConfig, description="Receivers of a message when a run ends.")
    plan: PlanConfig = Field(
        default_factory=PlanConfig, description="What vlmpipe plan assumes, and what needs confirmation."
    )
    gcp: GcpConfig = Field(
        default_factory=GcpConfig,
        description="The Google Cloud project of pipeline and jobs. On Kubeflow only pipeline_image and pipeline_root "
        "are used.",
    )
    kubeflow: KubeflowConfig = Field(
        default_factory=KubeflowConfig, description="The Kubernetes cluster of --target kubeflow."
    )

    @field_validator("stages")
    @classmethod
    def _some_stage(cls, stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
        if not stages:
            raise ValueError("expected at least one stage; leave stages out where the run file is the only one")
        return stages

    @cached_property
    def source(self) -> tuple[str, ...]:
        """The run file on the command line: path and overrides, set by `load_run_file` or `derived`; else its name."""
        return (self.name,)

    @cached_property
    def subcommand(self) -> str:
        """The subcommand that derived these settings from a run file, set by `derived`; empty for run and submit."""
        return ""

    @property
    def model_name(self) -> str:
        """Name in the registry."""
        return self.register_.model_name or self.name

    @property
    def bucket_root_uri(self) -> str:
        """Root of runs, prepared data, features and the registry where only gs:// is reached."""
        root_uri = self.output.root_uri
        return root_uri if root_uri.startswith("gs://") else self.gcp.pipeline_root

    def given(self, *without: str) -> dict[str, Any]:
        """The run file without defaults, so that each stage's or variant's file knows which fields were given."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={*without})

    def to_dict(self) -> dict[str, Any]:
        """The run file with all defaults, in JSON's types."""
        absent = {name for name in ("stages", "sweep") if not getattr(self, name)}
        return self.model_dump(mode="json", by_alias=True, exclude=absent)

    def to_run_json(self, run: RunPaths) -> dict[str, Any]:
        """The effective run file of one run, as `resolve_run` writes it and `JobConfig.load` reads it."""
        sections = self.to_dict()
        return {"version": sections.pop("version"), "name": sections.pop("name"), "run": run.model_dump(), **sections}

    def digest(self) -> str:
        """sha256 (hex) of everything in the run file; equal for files that differ in form only."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def stage_runs(self) -> dict[str, Self]:
        """The run file of each stage, by the stage's name; without stages this one, under an empty name.

        Its `model` section is where the first stage starts. The last stage is the run itself.
        """
        if not self.stages:
            return {"": self}
        return {name: self.model_validate(content) for name, content in self.stage_contents().items()}

    def stage_contents(self) -> dict[str, dict[str, object]]:
        """The run file of each stage as read from YAML."""
        return stage_contents(self.given("stages", "sweep"), self.stages)

    def variant(self, variant: Variant) -> Self:
        """The run file of one variant of the sweep. Raises RunFileError that lists every problem."""
        return self.parsed(with_overrides(self.given("sweep"), variant.values), f"variant {variant.name}")

    def training_of(self, variant: Variant) -> Self:
        """The run file of the variant's trainings: that of its last stage. Raises as `variant`."""
        return list(self.variant(variant).stage_runs().values())[-1]

    @classmethod
    def parsed(cls, data: Mapping[str, object], source: str) -> Self:
        """Check a run file's content. Raises RunFileError, which names `source` and lists every problem."""
        try:
            return cls.model_validate(with_exports(data, source))
        except ValidationError as error:
            raise RunFileError(source, from_validation_error(error, cls)) from None
