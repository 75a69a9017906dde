"""Settings of `deploy` that no endpoint can serve, known before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.config.validation_errors import Problem
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig


def deploy_problems(config: RunConfig) -> Iterator[Problem]:
    deploy, trainer = config.deploy, config.train.trainer
    if deploy is None:
        return
    if trainer and trainer.evaluate_command:
        text = "found with train.trainer.evaluate_command, which leaves no answers to compare the endpoint's with"
        yield Problem("deploy", f"{text}; expected one of the two")
    if deploy.image_uri and config.register_.serving:
        yield Problem("deploy.image_uri", "found with register.serving, which is the container; expected one of both")
    if config.register_.serving is None:
        try:
            deploy.arguments(config.model_name, config.model, config.train.precision)
        except ConfigError as error:
            yield Problem("deploy", f"{error.found}; expected {error.expected}")
