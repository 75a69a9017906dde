"""A model behind a KServe InferenceService: with a share of the traffic while it is tested, then with its own.

The form is serving.kserve.io/v1beta1 (github.com/kserve/kserve, pkg/apis/serving/v1beta1): a custom predictor's
container, whose STORAGE_URI KServe downloads to /mnt/models. Shares, and an address of the newest revision alone, are
those of its Knative mode.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kubernetes import client

from vlmpipe.config.sections.deploy import CHAT_ROUTE, PORT, DeployConfig
from vlmpipe.config.sections.kubeflow import KubeflowConfig
from vlmpipe.platforms.kubeflow.jobs.client import LIMIT, Kind, connection, translated_errors
from vlmpipe.platforms.kubeflow.jobs.manifest import GPU
from vlmpipe.platforms.kubeflow.jobs.status import NoSuchObject, Unreachable
from vlmpipe.serving.agreement import Ask
from vlmpipe.serving.openai import ChatServer
from vlmpipe.trainer.errors import ExitCode, UserError

GROUP, VERSION, PLURAL = "serving.kserve.io", "v1beta1", "inferenceservices"
GUIDE = "vlmpipe docs deploy"
KIND = Kind("InferenceService", f"{GROUP}/{VERSION}", "KServe", "in its Knative mode", "deploy", "vlmpipe docs deploy")
FOLDER = "/mnt/models"  # where KServe puts the files of STORAGE_URI
TAGS = "serving.kserve.io/enable-tag-routing"  # an address for the newest revision
BEFORE, RUN = "vlmpipe/before", "vlmpipe/run"  # the spec to go back to; null: none
SHARED_MEMORY = "shared-memory"
POLL_S = 2.0
Json = dict[str, Any]


class InferenceService:
    """The InferenceService of a run's deploy section, in this pod's namespace."""

    def __init__(self, deploy: DeployConfig, placement: KubeflowConfig, arguments: Sequence[str]) -> None:
        self._deploy, self._placement, self._arguments = deploy, placement, arguments
        api, namespace = connection()
        self._api = client.CustomObjectsApi(api)
        self._place = {"group": GROUP, "version": VERSION, "plural": PLURAL, "namespace": namespace}

    @contextlib.contextmanager
    def canary(self, model_uri: str, run_id: str) -> Iterator[str]:
        """Serve the model of `model_uri` for the block; yields the address of its revision.

        When the block raises, the service has its former spec again, or is gone if there was none. What an attempt
        that ended halfway left is found by its annotations.
        """
        result = self._get()
        before = None if result is None else result["spec"]
        if result and BEFORE in result["metadata"].get("annotations", {}):
            before = json.loads(result["metadata"]["annotations"][BEFORE])
        body = self._manifest(model_uri, run_id, before)
        if result:  # an update replaces all annotations: those of others stay
            annotations = body["metadata"]["annotations"]
            body["metadata"]["annotations"] = {**result["metadata"].get("annotations", {}), **annotations}
        try:
            self._send(body, result)
            yield self._address(body, alone=before is not None)
        except BaseException:
            self._undo(before)
            raise

    def ask(self, url: str, name: str) -> Ask:
        return ChatServer(f"{url.rstrip('/')}{CHAT_ROUTE}", name).ask

    def promote(self) -> int:
        """Give the new model its final share of the traffic. Returns the share."""
        result = self._get()
        assert result, "deployed just now"
        first = json.loads(result["metadata"]["annotations"].pop(BEFORE)) is None
        percent = 100 if first else self._deploy.traffic_percent
        result["spec"]["predictor"].pop("canaryTrafficPercent", None)
        if percent < 100:
            result["spec"]["predictor"]["canaryTrafficPercent"] = percent
        self._send({**result, "status": {}}, result)
        return percent

    def _manifest(self, model_uri: str, run_id: str, before: Json | None) -> Json:
        deploy, placement = self._deploy, self._placement
        gpus = {GPU: str(deploy.accelerator_count)} if deploy.accelerator_count else {}
        container = {
            "name": "kserve-container",
            "image": deploy.image_uri,
            "args": list(self._arguments),
            "env": [
                {"name": "STORAGE_URI", "value": placement.claim_uri(model_uri)},
                *({"name": name, "value": value} for name, value in deploy.environment.items()),
            ],
            "ports": [{"containerPort": PORT, "protocol": "TCP"}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}},
            "volumeMounts": [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}],
            **({"resources": {"limits": gpus, "requests": gpus}} if gpus else {}),
        }
        tolerations = [{"key": GPU, "operator": "Exists"}] if gpus else []
        predictor: Json = {
            "minReplicas": deploy.min_replicas,
            "maxReplicas": deploy.max_replicas,
            "containers": [container],
            "volumes": [
                {
                    "name": SHARED_MEMORY,
                    "emptyDir": {"medium": "Memory", "sizeLimit": f"{deploy.shared_memory_size_mb}M"},
                }
            ],
            **({"serviceAccountName": placement.service_account} if placement.service_account else {}),
            **({"nodeSelector": dict(placement.node_selector)} if placement.node_selector else {}),
            **({"tolerations": tolerations} if tolerations else {}),
        }
        if before is not None:
            predictor["canaryTrafficPercent"] = deploy.canary_percent
        annotations = {TAGS: "true", RUN: run_id, BEFORE: json.dumps(before)}
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "InferenceService",
            "metadata": {"name": deploy.endpoint, "annotations": annotations},
            "spec": {"predictor": predictor},
        }

    def _address(self, body: Json, *, alone: bool) -> str:
        """Wait until the newest revision is ready and return its address. Raises UserError after the timeout."""
        until, why = time.monotonic() + self._deploy.deployment_timeout_s, "it has no status yet"
        while time.monotonic() < until:
            result = self._get() or {}
            status = result.get("status", {})
            predictor = status.get("components", {}).get("predictor", {})
            newest = predictor.get("latestCreatedRevision")
            is_seen = status.get("observedGeneration") == result.get("metadata", {}).get("generation")
            conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
            if is_seen and newest and predictor.get("latestReadyRevision") == newest:
                tagged = [
                    target
                    for target in predictor.get("traffic", ())
                    if target.get("latestRevision") and target.get("url")
                ]
                url = tagged[0]["url"] if tagged else None if alone else status.get("url")
                if url:
                    return str(url)
                why = "its newest revision has no address of its own"
            else:
                ready = conditions.get("PredictorReady") or conditions.get("Ready") or {}
                why = " ".join(filter(None, [ready.get("reason"), ready.get("message")])) or why
            time.sleep(POLL_S)
        raise UserError(
            f"InferenceService {body['metadata']['name']} does not serve after {self._deploy.deployment_timeout_s} s: "
            f"{why}",
            expected=f"a ready revision, of {KIND.product} {KIND.release}",
            fix="look at its pods for what they wait for, or raise deploy.deployment_timeout_s",
            code=ExitCode.UNAVAILABLE,
        )

    def _undo(self, before: Json | None) -> None:
        result = self._get()
        if result is None:
            return
        if before is None:
            with self._errors("delete"), contextlib.suppress(NoSuchObject):
                self._api.delete_namespaced_custom_object(**self._place, name=self._deploy.endpoint, **LIMIT)
            return
        former = copy.deepcopy(result)
        former["spec"] = before
        former["metadata"]["annotations"].pop(BEFORE, None)
        self._send(former, result)

    def _send(self, body: Json, existing: Json | None) -> None:
        """Create the service, or replace an existing one."""
        content = {key: value for key, value in body.items() if key != "status"}
        strict: dict[str, object] = {"field_validation": "Strict", **LIMIT}
        if existing is None:
            with self._errors("create"):
                self._api.create_namespaced_custom_object(**self._place, body=content, **strict)
            return
        metadata = {**existing["metadata"], **content["metadata"]}
        with self._errors("update"):
            self._api.replace_namespaced_custom_object(
                **self._place, name=self._deploy.endpoint, body={**content, "metadata": metadata}, **strict
            )

    def _get(self) -> Json | None:
        try:
            with self._errors("get"):
                result: Json = self._api.get_namespaced_custom_object(
                    **self._place, name=self._deploy.endpoint, **LIMIT
                )
            return result
        except NoSuchObject:
            return None

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            with translated_errors(doing, KIND):
                yield
        except Unreachable as error:
            raise UserError(str(error), fix="run the step again", code=ExitCode.UNAVAILABLE) from error
