"""The container that serves a run's registered model: `register.serving`, or vLLM's server."""

from __future__ import annotations

from vlmpipe.config.run_fields import RunFields
from vlmpipe.config.sections.deploy import CHAT_ROUTE, PORT, DeployConfig
from vlmpipe.config.sections.output import ServingConfig
from vlmpipe.trainer.errors import ConfigError


def container_of(run: RunFields) -> ServingConfig:
    """Return the container on Vertex AI. Raises as `arguments_of`."""
    if run.register_.serving:
        return run.register_.serving
    deploy = require_deploy(run)
    return ServingConfig(
        image_uri=deploy.image_uri,
        args=tuple(arguments_of(run)),
        port=PORT,
        predict_route=CHAT_ROUTE,
        health_route="/health",
        env=deploy.environment,
        shared_memory_size_mb=deploy.shared_memory_size_mb,
        deployment_timeout_s=deploy.deployment_timeout_s,
    )


def arguments_of(run: RunFields, folder: str = "{model_uri}") -> list[str]:
    """Return vLLM's arguments for a model with its files in `folder`. Raises as `DeployConfig.arguments`."""
    return require_deploy(run).arguments(run.model_name, run.model, run.train.precision, folder)


def require_deploy(run: RunFields) -> DeployConfig:
    """Return the section deploy. Raises ConfigError for a run without one."""
    if run.deploy is None:
        raise ConfigError("the run file has no section deploy", expected="deploy, with an endpoint and an image")
    return run.deploy
