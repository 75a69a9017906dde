"""An example project for tests that compile a laptop's run file for Vertex AI: shipped ones have no section gcp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.config.yaml_loader import read_run_file

REGISTRY = "us-central1-docker.pkg.dev/example-project/vlmpipe"
FIELDS = {
    "cluster.image_uri": f"{REGISTRY}/trainer@sha256:{'0' * 63}1",
    "gcp.project": "example-project",
    "gcp.service_account": "vlmpipe@example-project.iam.gserviceaccount.com",
    "gcp.pipeline_root": "gs://example-bucket/vlmpipe",
    "gcp.pipeline_image": f"{REGISTRY}/pipeline@sha256:{'0' * 63}2",
}


def for_vertex(overrides: Sequence[str] = ()) -> list[str]:
    """The example project's fields and `overrides`, which may replace some of them."""
    replaced = {text.partition("=")[0] for text in overrides}
    fields = {name: value for name, value in FIELDS.items() if not replaced & {name, name.partition(".")[0]}}
    return [*(f"{name}={value}" for name, value in fields.items()), *overrides]


def load_for_vertex(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run file as in the example project."""
    return load_run_file(path, for_vertex(overrides))


def load_shipped(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A shipped run file for Vertex AI: one for a laptop as in the example project, others with their own values."""
    names_image = "image_uri" in read_run_file(Path(path)).get("cluster", {})
    return load_run_file(path, overrides) if names_image else load_for_vertex(path, overrides)
