"""Deploys a registered run: served, asked validation questions, and undone if it answers otherwise than evaluated."""

from __future__ import annotations

from vlmpipe.config.run_settings import RunSettings
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.config.serving_container import require_deploy
from vlmpipe.platforms.table import platform_of
from vlmpipe.records.registered import Registered
from vlmpipe.registry.release import require_container
from vlmpipe.serving.agreement import Agreement
from vlmpipe.serving.questions import validation_questions
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import write_record

RECORD = "deployed.json"


def deploy_run(run_uri: str, where: str) -> Agreement:
    """Serve the run's registered model as its deploy section says; writes `deployed.json`. Safe to repeat.

    where: the pipeline's platform, by its name for --target.

    Raises UserError (76) where its answers are not the evaluation's or its quantized export was refused, and others
    where the endpoint refuses; the endpoint is as before then.
    """
    store = open_storage(run_uri)
    registered = Registered.read_if_there(store)
    if registered is None:
        raise ConfigError(f"no {store.uri(Registered.FILE)}", expected="a registered model", fix="register it first")
    settings = RunSettings.read(store)
    deploy = require_deploy(settings)
    registered.served_uri(deploy.quantized)  # before anything is asked of an endpoint
    if deploy.quantized or registered.quantized:
        require_container(settings, registered)
    questions = validation_questions(run_uri, deploy.smoke_questions)
    agreement, served = platform_of(where).deploy(run_uri, settings, registered, questions)
    write_record(
        store, RECORD, {**served, "model": registered.model, **_quantized(deploy), **agreement.as_json()}, indent=1
    )
    return agreement


def _quantized(deploy: DeployConfig) -> dict[str, str]:
    return {"quantized": deploy.quantized} if deploy.quantized else {}
