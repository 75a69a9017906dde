"""The run file's `output`, `gate` and `register` sections: where results go, and on what conditions models."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from vlmpipe.config.sections.cluster import Environment
from vlmpipe.trainer.config.base import Fraction, NonNegative, Positive, Section, StorageUri, storage_uri
from vlmpipe.trainer.evaluation.significance.paired import default_margin
from vlmpipe.trainer.secret_manager import SECRET_NAME

MAX_SCORES = {"vqa_accuracy": 1.0, "anls": 1.0, "cider_d": 10.0, "preference_accuracy": 1.0}
MAX_DEPLOYMENT_S = 2 * 3600  # aiplatform_v1 ModelContainerSpec.deployment_timeout
_REPO_ID = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?/\w([\w.-]*\w)?", re.ASCII)
# 0 would ask for a model that is better beyond chance, which no number of questions shows of one that is as good.
Regression = Annotated[float, Field(gt=0.0, le=1.0)]
_MODEL_ID = re.compile(r"vertex://[a-z0-9_][a-z0-9_-]{0,62}")


class OutputConfig(Section):
    """Where everything is written."""

    root_uri: StorageUri = Field(
        "runs",
        min_length=1,
        description="Folder, or gs:// or s3:// prefix, for runs, prepared data, features and the registry. "
        "gcp.pipeline_root replaces a local folder on other machines.",
    )


class GateConfig(Section):
    """The conditions for registering a model. `gate: none` accepts every model."""

    bounds: Literal["required", "none"] = Field(
        "required",
        description="Whether conditions are required; none accepts every model, also if there is a champion, as "
        "`gate: none` does.",
    )
    min_exact_match: Fraction = Field(
        0.0, description="Minimum exact match on the validation split, as a share of the questions."
    )
    max_loss: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Maximum evaluation loss, in nats per label token; null does not check.",
    )
    per_slice: dict[str, Fraction] = Field(
        default_factory=dict, description="Minimum exact match of single slices, for example {digit: 0.9}."
    )
    min_scores: dict[Literal["vqa_accuracy", "anls", "cider_d", "preference_accuracy"], NonNegative] = Field(
        default_factory=dict,
        description="Minimum of other scores of the evaluation, for example {cider_d: 0.8}: vqa_accuracy, anls and "
        "preference_accuracy (the share of validation pairs whose chosen answer is likelier) from 0 to 1, cider_d "
        "from 0 to 10.",
    )
    benchmarks: dict[str, dict[str, NonNegative]] = Field(
        default_factory=dict,
        description="Minimum scores of single benchmarks of evaluate.benchmarks, by name, for example {pope: "
        "{accuracy: 0.8}}, and of tasks of evaluate.lmms_eval, by lmms-eval's names of scores.",
    )
    max_regression: Regression | Literal["auto"] | None = Field(
        "auto",
        description="Drop of exact match against the champion that the paired answers must rule out, at a one-sided "
        "level of 5 %; auto is the smallest drop that this number of questions can detect, null does not check.",
    )
    when_not_comparable: Literal["skip", "reject"] = Field(
        "reject",
        description="Decision if the champion could not be asked the same questions: reject rejects the model, skip "
        "relies on the other checks.",
    )
    min_questions: Positive = Field(
        50,
        description="Minimum number of validation questions, in the evaluation and in each comparison of answers. Lower"
        " it for a small validation split.",
    )
    min_margin_over_chance: Fraction | None = Field(
        0.0,
        description="Lead of exact match over the majority baseline, the most frequent training answer to each "
        "question, that answers must show at a one-sided level of 5 %; null does not check.",
    )
    min_margin_over_shuffled_image: Fraction | None = Field(
        None,
        description="Lead of exact match over the same model with another sample's image, that answers must show at a "
        "one-sided level of 5 %; null does not check.",
    )
    min_gain: Fraction | None = Field(
        None,
        description="Lead of exact match over the start weights that answers must show at a one-sided level of 5 %; "
        "null does not check. For runs with evaluate.baseline auto that start from trained weights.",
    )
    max_forgetting: Regression | None = Field(
        None,
        description="Loss on the retention probe, as a share of its questions, that answers of start and trained "
        "weights must rule out at a one-sided level of 5 %; null does not check. For runs with a baseline.",
    )
    max_mean_image_tokens: float | None = Field(
        None,
        gt=0,
        description="Maximum mean number of visual tokens that an image keeps; null does not check. For models with "
        "model.relevance.",
    )
    max_images_also_in_train: Fraction | None = Field(
        None,
        description="Maximum share of validation images that are also in the training split; null does not check. Set "
        "it to reject runs whose splits share images.",
    )
    max_images_like_train: Fraction | None = Field(
        None,
        description="Maximum share of images that look like a training image, in the validation split and in each of "
        "evaluate.benchmarks; null does not check. Set it to reject runs with near copies in both splits.",
    )

    @model_validator(mode="before")
    @classmethod
    def _none(cls, value: object) -> object:
        return {"bounds": "none"} if value == "none" else value

    @field_validator("min_scores")
    @classmethod
    def _can_be_reached(cls, floors: dict[str, float]) -> dict[str, float]:
        for metric, floor in floors.items():
            if floor > MAX_SCORES[metric]:  # probably a percentage
                raise ValueError(f"{metric} {floor:g} is more than its largest value, {MAX_SCORES[metric]:g}")
        return floors

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Self:
        fields = type(self).model_fields
        others = [
            name
            for name, value in self
            if name != "bounds" and value != fields[name].get_default(call_default_factory=True)
        ]
        if self.bounds == "none" and others:
            raise ValueError(f"found {', '.join(others)} with bounds none, which accepts every model; expected either")
        return self

    @property
    def checks_something(self) -> bool:
        """Return whether any threshold could reject a first model, which has no champion."""
        bounds = (
            self.max_loss, self.min_gain, self.max_forgetting, self.min_margin_over_chance,
            self.min_margin_over_shuffled_image, self.max_mean_image_tokens, self.max_images_also_in_train,
            self.max_images_like_train,
        )  # fmt: skip
        named = self.min_exact_match or self.per_slice or self.min_scores or self.benchmarks
        return self.bounds == "required" and (bool(named) or any(bound is not None for bound in bounds))

    def margin(self, questions: int) -> float | None:
        """Return the drop that must be ruled out for this number of questions, or None if none must."""
        return default_margin(questions) if self.max_regression == "auto" else self.max_regression


def _registry(place: str) -> str:
    if not place.startswith("vertex:"):
        return storage_uri(place)
    if not _MODEL_ID.fullmatch(place):
        raise ValueError("vertex://MODEL_ID takes lower-case letters, digits, _ and -, 63 at most")
    return place


def _repo_id(name: str) -> str:
    if not _REPO_ID.fullmatch(name) or "--" in name or ".." in name or name.endswith(".git") or len(name) > 96:
        raise ValueError("expected account/name: letters, digits, '-', '_' and '.', 96 at most, no '--' or '..'")
    return name


class ServingConfig(Section):
    """The container in which Vertex AI serves a registered model once it is deployed."""

    image_uri: str = Field(
        pattern=r"^([a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)/[a-z0-9._/-]+(@sha256:[0-9a-f]{64}|:[A-Za-z0-9._-]+)$",
        description="Serving image in Artifact Registry; it finds the model at AIP_STORAGE_URI.",
    )
    command: tuple[str, ...] = Field((), description="Command instead of the image's own; empty keeps it.")
    args: tuple[str, ...] = Field(
        (), description="Arguments; {model_uri} in one of them becomes the registered folder's gs:// URI."
    )
    port: int = Field(8080, ge=1, le=65535, description="Port at which the container answers.")
    predict_route: str = Field("", pattern=r"^(/.*)?$", description="HTTP path of predictions; empty for Vertex AI's.")
    health_route: str = Field("", pattern=r"^(/.*)?$", description="HTTP path of health checks; empty for Vertex AI's.")
    env: Environment = Field(default_factory=dict, description="Environment variables of the container. No secrets.")
    shared_memory_size_mb: Positive | None = Field(
        None, description="Size of /dev/shm, in MB of the machine's memory; null takes Vertex AI's default."
    )
    deployment_timeout_s: int | None = Field(
        None,
        gt=0,
        le=MAX_DEPLOYMENT_S,
        description="Seconds within which the container must be healthy, at most 7200; null takes Vertex AI's default. "
        "Set it for models that take longer to load.",
    )


class HubConfig(Section):
    """The repository of the Hugging Face hub to which an accepted model is uploaded, with its card."""

    repo_id: Annotated[str, AfterValidator(_repo_id)] = Field(
        description="Repository, account/name; created if missing."
    )
    private: bool = Field(
        True, description="Make a missing repository private, and refuse one that is public; false makes it public."
    )
    token_secret: str | None = Field(
        None,
        pattern=rf"^{SECRET_NAME}$",
        description="Secret Manager secret with a token that may write to the repository, "
        "projects/PROJECT/secrets/NAME; null uses HF_TOKEN, which only a local run has.",
    )
    revision: str = Field(
        "main", pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,254}$", description="Branch; created if missing."
    )


class RegisterConfig(Section):
    """How an accepted model is registered."""

    registry: Annotated[str, AfterValidator(_registry)] = Field(
        "",
        description="Where versions are stored: a folder, a gs:// or s3:// prefix, or vertex://MODEL_ID for a model of "
        "Vertex AI Model Registry; empty takes registry/ under output.root_uri.",
    )
    serving: ServingConfig | None = Field(
        None,
        description="Serving container of the registered model; null for none. Needed with vertex://, and for it only.",
    )
    model_name: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,127})?$",
        description="Name in the registry; empty takes the run's name.",
    )
    alias: str = Field(
        "champion", pattern=r"^[a-z][a-z0-9-]{0,126}[a-z0-9]$", description="Alias that moves to the accepted version."
    )
    hub: HubConfig | None = Field(
        None, description="Repository of the Hugging Face hub that gets a copy of the registered model; null for none."
    )
