"""A compiled pipeline: its file, its counts, and where it is published."""

from __future__ import annotations

import hashlib
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


def described(path: Path, spec: pipeline_spec_pb2.PipelineSpec) -> Compiled:
    """The description of the pipeline `spec` in the file `path`."""
    jobs = sum("worker_pool_specs" in component.input_definitions.parameters for component in spec.components.values())
    return Compiled(path, spec.pipeline_info.name, len(spec.deployment_spec["executors"]), jobs)
