"""The run file's `output` and `register` sections: where results and accepted models go."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from trainer.config.base import Section, StorageUri, storage_uri
from vlmpipe.config.cluster import Environment

_MODEL_ID = re.compile(r"vertex://[a-z0-9_][a-z0-9_-]{0,62}")


class OutputConfig(Section):
    """Where everything is written."""

    root_uri: StorageUri = Field(
        "runs",
        min_length=1,
        description="Folder or gs:// prefix for runs, prepared data, features and the registry. A local folder is used "
        "on this machine; elsewhere gcp.pipeline_root then takes its place.",
    )


def _registry(place: str) -> str:
    if not place.startswith("vertex:"):
        return storage_uri(place)
    if not _MODEL_ID.fullmatch(place):
        raise ValueError("vertex://MODEL_ID takes lower-case letters, digits, _ and -, 63 at most")
    return place


class ServingConfig(Section):
    """The container in which Vertex AI serves a registered model, once somebody deploys it."""

    image_uri: str = Field(
        pattern=r"^([a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)/[a-z0-9._/-]+(@sha256:[0-9a-f]{64}|:[A-Za-z0-9._-]+)$",
        description="Serving image in Artifact Registry; it finds the model at AIP_STORAGE_URI.",
    )
    command: tuple[str, ...] = Field((), description="Command instead of the image's own.")
    args: tuple[str, ...] = Field(
        (), description="Arguments; {model_uri} in one of them becomes the registered folder's gs:// URI."
    )
    port: int = Field(8080, ge=1, le=65535, description="Port at which the container answers.")
    predict_route: str = Field("", pattern=r"^(/.*)?$", description="HTTP path of predictions; empty for Vertex AI's.")
    health_route: str = Field("", pattern=r"^(/.*)?$", description="HTTP path of health checks; empty for Vertex AI's.")
    env: Environment = Field(default_factory=dict, description="Environment of the container. No secrets.")


class RegisterConfig(Section):
    """How an accepted model is registered."""

    registry: Annotated[str, AfterValidator(_registry)] = Field(
        "",
        description="Where versions are stored: a folder, a gs:// prefix, or vertex://MODEL_ID for a model of Vertex "
        "AI Model Registry; empty takes registry/ under output.root_uri.",
    )
    serving: ServingConfig | None = Field(
        None, description="Serving container of the registered model; needed, and used, with vertex:// only."
    )
    model_name: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,127})?$",
        description="Name in the registry; empty takes the run's name.",
    )
    alias: str = Field(
        "champion", pattern=r"^[a-z][a-z0-9-]{0,126}[a-z0-9]$", description="Alias that moves to the accepted version."
    )
