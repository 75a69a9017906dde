"""Deploys a registered run: served, asked validation questions, and undone if it answers otherwise than evaluated."""

from __future__ import annotations

from typing import Any

from vlmpipe.config.sections.deploy import DeployConfig, arguments_of, served_name
from vlmpipe.config.sections.kubeflow import KubeflowConfig
from vlmpipe.platforms.vertex.client import Place
from vlmpipe.records.registered import Registered
from vlmpipe.serving.agreement import Agreement, measure_agreement, require_agreement
from vlmpipe.serving.openai import CHAT_PATH, ChatServer
from vlmpipe.serving.questions import held_out_questions
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.serving.local_server import serving
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record, write_record

RECORD = "deployed.json"


def deploy_run(run_uri: str, where: str) -> Agreement:
    """Serve the run's registered model as its deploy section says; writes `deployed.json`. Safe to repeat.

    where: the pipeline's target: vertex, kubeflow or local.

    Raises UserError (76) where its answers are not the evaluation's, and others where the endpoint refuses; the
    endpoint is as before then.
    """
    store = open_storage(run_uri)
    registered = Registered.read_if_there(store)
    if registered is None:
        raise ConfigError(f"no {store.uri(Registered.FILE)}", expected="a registered model", fix="register it first")
    settings = read_record(store, "run.json")
    deploy = DeployConfig.model_validate(settings["deploy"])
    questions = held_out_questions(run_uri, deploy.smoke_questions)
    found: Agreement
    served: dict[str, Any]
    if where == "local":
        with serving(run_uri) as server:
            found = measure_agreement(questions, ChatServer(f"{server.url}{CHAT_PATH}", server.model).ask)
            require_agreement(found, deploy.min_agreement)
        served = {"server": "transformers serve"}
    elif where == "vertex":
        from vlmpipe.platforms.vertex.endpoint import VertexEndpoint

        gcp = settings["gcp"]
        place = Place(gcp["project"], gcp["location"], gcp["job_service_account"] or gcp["service_account"])
        endpoint = VertexEndpoint(place, deploy, labels=gcp["labels"], encryption_key=gcp["encryption_spec_key_name"])
        endpoint.require_public(questions, served_name(settings))
        with endpoint.canary(registered.resource, settings["run"]["run_id"]) as canary:
            found = measure_agreement(questions, endpoint.ask(canary, served_name(settings)))
            require_agreement(found, deploy.min_agreement)
        served = {"endpoint": endpoint.name, "traffic_split": endpoint.promote(canary)}
    else:
        from vlmpipe.platforms.kubeflow.inference_service import FOLDER, InferenceService

        service = InferenceService(
            deploy, KubeflowConfig.model_validate(settings["kubeflow"]), arguments_of(settings, FOLDER)
        )
        with service.canary(registered.uri, settings["run"]["run_id"]) as url:
            found = measure_agreement(questions, service.ask(url, served_name(settings)))
            require_agreement(found, deploy.min_agreement)
        served = {"inference_service": deploy.endpoint, "traffic_percent": service.promote()}
    write_record(store, RECORD, {**served, "model": registered.model, **found.as_json()}, indent=1)
    return found
