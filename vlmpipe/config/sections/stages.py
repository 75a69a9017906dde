"""The run file's `stages`: trainings that follow each other in one run, each from the model of the one before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pydantic import Field

from vlmpipe.config.overrides import apply_overrides, leaves, merged, replaced
from vlmpipe.config.sections.sweep import hidden_by_sweep
from vlmpipe.config.validation_errors import Problem, ProblemsError, RunFileError, show
from vlmpipe.records.compiled import CompiledSettings
from vlmpipe.records.stage_folders import path_in, stage_run_id
from vlmpipe.trainer.config.base import Section
from vlmpipe.trainer.config.job import require_run_id, run_uri_of
from vlmpipe.trainer.config.weights.origin import ModelPart
from vlmpipe.trainer.errors import UserError

LONGEST_NAME = 63  # of a run file; a stage's jobs have its name after the run file's
# What a stage may change of the model: all else decides its weights' shapes or where the first stage takes them from.
OF_ONE_STAGE = (
    "freeze_parameters",
    "train_parameters",
    "lora",
    "min_pixels",
    "max_pixels",
    "longest_edge",
    "relevance",
)
OF_THE_LAST = ("max_regression", "when_not_comparable")  # conditions beside a registered champion


class StageConfig(Section):
    """One of several consecutive trainings: fields that differ from the run file's own sections."""

    name: str = Field(
        pattern=r"^[a-z]([a-z0-9-]{0,28}[a-z0-9])?$",
        description="Name of the stage: lower case, digits, dashes, at most 30.",
    )
    freeze: tuple[ModelPart, ...] | None = Field(
        None, description="Parts whose weights do not change in this stage; null takes those of model.freeze."
    )
    model: dict[str, object] = Field(
        default_factory=dict,
        description="Other fields of model in this stage: freeze_parameters, train_parameters, lora, and min_pixels, "
        "max_pixels or longest_edge, for images with more pixels in a later stage. Other fields are the same in all "
        "stages.",
    )
    data: dict[str, object] = Field(default_factory=dict, description="Fields of data in this stage.")
    features: dict[str, object] = Field(default_factory=dict, description="Fields of features in this stage.")
    train: dict[str, object] = Field(
        default_factory=dict, description="Fields of train in this stage, which ends by its epochs or max_steps."
    )
    checkpoint: dict[str, object] = Field(default_factory=dict, description="Fields of checkpoint in this stage.")
    evaluate: dict[str, object] = Field(default_factory=dict, description="Fields of evaluate in this stage.")
    gate: dict[str, object] | Literal["none"] = Field(
        default_factory=dict,
        description="Conditions for starting the next stage; none or empty always starts it. In the last stage, "
        "fields of the run file's gate, for registering the model.",
    )
    cluster: dict[str, object] = Field(default_factory=dict, description="Fields of cluster in this stage.")
    plan: dict[str, object] = Field(default_factory=dict, description="Fields of plan in this stage.")

    def changes(self) -> dict[str, object]:
        """The stage's own values, in the run file's sections."""
        sections = self.model_dump(mode="json", exclude={"name", "freeze"})
        changes = {name: section for name, section in sections.items() if section}
        if self.freeze is not None:
            changes["model"] = {**sections["model"], "freeze": list(self.freeze)}
        return changes


def run_uri(compiled: str, run_id: str, job_name: str) -> str:
    """The folder of the run or of one of its stages. Raises ConfigError for an id that cannot be a folder's name."""
    if name := run_id or job_name:  # a schedule's runs are named when they start
        require_run_id(name)
    settings = CompiledSettings.read(compiled)
    return run_uri_of(settings.root_uri, stage_run_id(run_id or job_name, settings.stage, settings.stages), "")


def stage_contents(content: Mapping[str, object], stages: Sequence[StageConfig]) -> dict[str, dict[str, object]]:
    """The content of each stage's own run file, by the stage's name. The last one is that of the run itself.

    Args:
        content: the run file's sections, without stages.

    Raises ProblemsError for a value of a stage that has no place in the run file.
    """
    contents = {}
    for stage in stages:
        try:
            values = merged(content, stage.changes())
        except ProblemsError as error:
            problems = [Problem(path_in(stage.name, problem.field), problem.text) for problem in error.problems]
            raise ProblemsError(problems) from None
        if (
            stage is not stages[-1]
        ):  # its model is not registered, so it has no champion, no common bounds and no quantized exports
            values |= {"name": f"{content['name']}-{stage.name}", "gate": _gate_between(stage), "register": {}}
            values["checkpoint"] = _unrounded(values.get("checkpoint", {}))
            if isinstance(evaluate := values.get("evaluate"), Mapping) and "quantize" not in stage.evaluate:
                values["evaluate"] = {name: value for name, value in evaluate.items() if name != "quantize"}
        contents[stage.name] = {**values, "schedule": None}
    return contents


def _gate_between(stage: StageConfig) -> dict[str, object] | str:
    """The gate of a stage whose model is not registered: its own bounds, and no default ones."""
    if not isinstance(stage.gate, Mapping) or not stage.gate or stage.gate == {"bounds": "none"}:
        return "none"
    return {"min_margin_over_chance": None, "min_questions": 1, **stage.gate}


def _unrounded(checkpoint: Mapping[str, object]) -> dict[str, object]:
    """The section `checkpoint` of a stage whose export the next one trains on from."""
    asked = checkpoint.get("export_dtype", "auto")
    return {**checkpoint, "export_dtype": "fp32" if asked == "auto" else asked}


def stage_problems(
    name: str, stages: Sequence[StageConfig], contents: Mapping[str, Mapping[str, object]], *, is_search: bool
) -> Iterator[Problem]:
    """Problems of the stages of the run file `name`, apart from the run file of each.

    Args:
        contents: `stage_contents`.
        is_search: the run file has a section tune.
    """
    if is_search:
        yield Problem("tune", "found with stages, expected null: the trials of a search are single trainings")
    names = [stage.name for stage in stages]
    for number, stage in enumerate(stages):
        path = f"stages.{stage.name}"
        if stage.name in names[:number]:
            yield Problem(f"stages.{number}.name", f"found {stage.name} twice, expected a name for each stage")
        for field in stage.model:
            if field == "freeze":
                yield Problem(f"{path}.model.freeze", "expected freeze of the stage itself")
            elif field not in OF_ONE_STAGE:
                text = (
                    "is the same in all stages, which train one model after another's export; expected it in the run "
                    f"file's model section, and here one of freeze, {', '.join(OF_ONE_STAGE)}"
                )
                yield Problem(f"{path}.model.{field}", text)
        if "confirm_above_usd" in stage.plan:
            text = "is compared with the cost of all stages together; expected it in the run file's plan section"
            yield Problem(f"{path}.plan.confirm_above_usd", text)
        if stage is not stages[-1]:
            if len(whole := f"{name}-{stage.name}") > LONGEST_NAME:
                yield Problem(path, f"is {whole} with the run file's name, expected at most {LONGEST_NAME} characters")
            bounds = stage.gate if isinstance(stage.gate, Mapping) else {}
            for field in OF_THE_LAST:
                if field in bounds:
                    text = f"found {show(bounds[field])}, but only the last stage's model is compared with a champion"
                    yield Problem(f"{path}.gate.{field}", text)
    yield from _adapter_problems(contents)


def _adapter_problems(contents: Mapping[str, Mapping[str, object]]) -> Iterator[Problem]:
    """The next stage needs a whole model, and begins with one."""
    first, last = next(iter(contents)), list(contents)[-1]
    for name, content in contents.items():
        model = content["model"]
        lora = (model.get("lora") if isinstance(model, Mapping) else None) or {}
        if name != last and lora.get("export") == "adapter":
            text = "found adapter, but the next stage starts from a whole model; expected merged"
            yield Problem(path_in(name, "model.lora.export"), text)
        if name != first and lora.get("pretrained"):
            text = f"found {show(lora['pretrained'])}, but this stage starts from the export of the one before"
            yield Problem(path_in(name, "model.lora.pretrained"), f'{text}; expected ""')


@contextlib.contextmanager
def naming_stage(stage: str, *, kind: str = "stage") -> Iterator[None]:
    """Errors for people inside the block name the stage or the variant; an empty name changes nothing."""
    try:
        yield
    except UserError as error:
        if stage:
            error.found = f"{kind} {stage}: {error.found}"
            error.args = (error.text(),)
        raise


def problems_of_stages(by_stage: Mapping[str, Sequence[Problem]]) -> list[Problem]:
    """Problems by stage as those of the run file: what all stages share is the run file's own."""
    shared = set.intersection(*map(set, by_stage.values()))
    unshared = [
        Problem(path_in(stage, problem.field), problem.text)
        for stage, problems in by_stage.items()
        for problem in problems
        if problem not in shared
    ]
    return [*(problem for problem in next(iter(by_stage.values())) if problem in shared), *unshared]


def hidden_by_stages(content: Mapping[str, object], fields: Sequence[str]) -> dict[str, list[str]]:
    """Return the dotted `fields` for which stages have values of their own, each with the names of these stages."""
    stages = content.get("stages")
    hidden: dict[str, list[str]] = {}
    if not isinstance(stages, list):
        return hidden
    for stage in (entry for entry in stages if isinstance(entry, Mapping)):
        others = ("name",) if stage is stages[-1] else ("name", "gate")
        own_fields: dict[str, object] = {name: value for name, value in stage.items() if name not in others}
        paths = [path for path, value in leaves(own_fields) if value != {}]
        if own_fields.get("freeze") is not None:
            paths.append("model.freeze")
        for path in paths:
            for field in fields:
                if f"{path}.".startswith(f"{field}.") or f"{field}.".startswith(f"{path}."):
                    hidden.setdefault(field, []).append(str(stage.get("name")))
    return hidden


def with_overrides(data: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """A copy of the run file with overrides merged into it. Raises RunFileError for one that a stage or each variant of
    a sweep has its own value of: that value would stay."""
    content, overridden = apply_overrides(data, overrides), dict(leaves(overrides))
    fields = [*overridden, *(path for path, _ in replaced(overridden))]
    hidden = hidden_by_stages(content, fields)
    if hidden:
        problems = [
            Problem(field, f"stage {stages[0]} has its own; expected {path_in(stages[0], field)}, or another stage's")
            for field, stages in hidden.items()
        ]
        raise RunFileError("overrides", problems)
    if swept := hidden_by_sweep(content, fields):
        text = "every variant of the sweep has its own; expected one in sweep.grid or sweep.variants"
        raise RunFileError("overrides", [Problem(field, text) for field in swept])
    return content
