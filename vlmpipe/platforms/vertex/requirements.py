"""Requirements of Vertex AI in a run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vlmpipe.catalog.machines import unknown_region
from vlmpipe.config import service_forms as forms
from vlmpipe.config.rules.confinement import service_confinement_problems
from vlmpipe.config.service_forms import Form
from vlmpipe.config.validation_errors import Problem, show
from vlmpipe.platforms.base import Look
from vlmpipe.platforms.example_values import EXAMPLE_PROJECT
from vlmpipe.platforms.requirements import (
    benchmark_image,
    hub_token,
    raise_problems,
    require_files,
    serving_image,
    violated,
)
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

FIX = (
    "copy the missing fields from vlmpipe docs first-run-on-vertex into the run file; in a clone, make build "
    "config=FILE writes the images, and make takes the fields of your project from env.sh"
)
REGISTRY = Form(r"|(gs|vertex)://.*", "gs:// or vertex://MODEL_ID: no step sees a folder here")
VERTEX: Mapping[str, Form] = {
    "gcp.project": forms.PROJECT,
    "gcp.service_account": forms.SERVICE_ACCOUNT,
    "gcp.pipeline_image": forms.IMAGE,
    "cluster.image_uri": forms.IMAGE,
    "gcp.pipeline_root": forms.BUCKET_PREFIX,
    "register.registry": REGISTRY,
}


def require_vertex(config: RunConfig) -> None:
    """Raise RunFileError unless the run file has what Vertex AI needs to compile a pipeline."""
    deploys = [] if config.register_.serving else serving_image(config, forms.IMAGE)
    if config.deploy and not config.deploy.cloud_run and not config.register_.registry.startswith("vertex://"):
        text = f"found with register.registry {show(config.register_.registry)}, expected vertex://MODEL_ID"
        deploys.append(Problem("deploy", f"{text}: an endpoint serves models of Vertex AI Model Registry"))
    if config.deploy and config.deploy.cloud_run and not config.register_.registry:
        text = "missing with deploy.cloud_run, expected vertex://MODEL_ID or gs://bucket/folder"
        deploys.append(Problem("register.registry", f"{text}: the service mounts the registered model"))
    problems = [*violated(config, VERTEX), *_packages_elsewhere(config), *deploys, *hub_token(config)]
    problems += [*benchmark_image(config, forms.IMAGE), *service_confinement_problems(config, "kubeflow.")]
    raise_problems(config, "Vertex AI", problems, fix=FIX)


def require_reached_files(config: RunConfig) -> None:
    """Raise RunFileError unless jobs on Vertex AI can read the run's files. A pipeline can be compiled without."""
    require_files(config, "Vertex AI", lambda uri: uri.startswith("gs://"), "a gs:// path")


def require_own_project(project: str) -> None:
    """Raise ConfigError for the project of the shipped run files."""
    if project == EXAMPLE_PROJECT:
        raise ConfigError(
            f"gcp.project is {EXAMPLE_PROJECT}, the shipped example's",
            expected="your own project, and your own bucket, service account and images with it",
            fix="set the gcp section, cluster.image_uri and output.root_uri; env.sh.example shows what make fills in",
        )


def look_at(config: RunConfig, problems: Sequence[Problem]) -> Look:
    """The line of `vlmpipe check` for a run file with these problems on Vertex AI: missing fields by name alone."""
    project, location = config.gcp.project, config.gcp.location
    if problems:
        fields = ", ".join(problem.field for problem in problems if problem.is_missing)
        needs = [f"it also needs {fields} (vlmpipe docs first-run-on-vertex)"] if fields else []
        others = [str(problem) for problem in problems if not problem.is_missing]
        return Look("unchecked", f"runs here, not on Vertex AI: {'; '.join([*needs, *others])}")
    if odd := unknown_region(location):
        return Look("warning", odd)
    if project == EXAMPLE_PROJECT:
        return Look("unchecked", f"complete, with the example values of the project {EXAMPLE_PROJECT}")
    return Look("ok", f"project {project} in {location}")


def _packages_elsewhere(config: RunConfig) -> list[Problem]:
    """Packages that Vertex AI could not read."""
    trainer = config.train.trainer
    here = [uri for uri in trainer.package_uris if not uri.startswith("gs://")] if trainer else []
    text = f"found {show(here[0])}, expected gs:// paths: `vlmpipe submit` builds and uploads them" if here else ""
    return [Problem("train.trainer.package_uris", text)] if here else []
