"""A compiled pipeline: its file, its counts, and where it is published."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.trainer.errors import os_errors

if TYPE_CHECKING:
    from kfp.pipeline_spec import pipeline_spec_pb2

    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.config.validation_errors import Problem

FOLDER = Path("build/pipelines")
CONTENT_TAG = "content-"
FINGERPRINT_CHARS = 16


@dataclass(frozen=True)
class Compiled:
    """A compiled pipeline: its file, and the checked counts of steps and jobs."""

    path: Path
    name: str
    steps: int
    jobs: int
    unused: tuple[Problem, ...] = ()  # settings of the run file without effect on the target
    unready: tuple[Problem, ...] = ()  # those with which no run there can start

    def fingerprint(self) -> str:
        """The tag that names these bytes in a registry of pipelines."""
        with os_errors(f"reading {self.path}"):
            return f"{CONTENT_TAG}{hashlib.sha256(self.path.read_bytes()).hexdigest()[:FINGERPRINT_CHARS]}"


@dataclass(frozen=True)
class Template:
    """A published pipeline and the run file in it. `address` names the version, whatever tag was asked for."""

    address: str
    compiled: Compiled
    config: RunConfig


def run_file_in(spec: object, parameters: Mapping[str, object]) -> dict[str, object] | None:
    """The run file that runs of a compiled pipeline read: the default of the parameter run_file, or its value.

    spec: the pipeline, in the API's spelling, also beside what it asks of a platform. None where it has no run file.
    """
    value: object = parameters.get("run_file")
    if value is None:
        value = spec.get("pipeline_spec", spec) if isinstance(spec, Mapping) else None
        for key in ("root", "inputDefinitions", "parameters", "run_file", "defaultValue"):
            value = value.get(key) if isinstance(value, Mapping) else None
    try:
        content = json.loads(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def described(path: Path, spec: pipeline_spec_pb2.PipelineSpec) -> Compiled:
    """The description of the pipeline `spec` in the file `path`."""
    jobs = sum("worker_pool_specs" in component.input_definitions.parameters for component in spec.components.values())
    return Compiled(path, spec.pipeline_info.name, len(spec.deployment_spec["executors"]), jobs)
