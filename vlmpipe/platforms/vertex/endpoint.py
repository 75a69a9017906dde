"""A registered model on a Vertex AI endpoint: with a share of the traffic while it is tested, then with its own.

Requests cannot choose among an endpoint's models. The service says with each answer which one gave it, so a question is
asked until the new model has answered.

An endpoint that is made here is a dedicated one, with an address of its own. One that exists is asked where it is: a
dedicated endpoint takes no requests at the region's address (aiplatform_v1 Endpoint.dedicated_endpoint_enabled).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from google.api_core import exceptions
from google.api_core.future.polling import DEFAULT_POLLING
from google.api_core.operation import from_gapic
from google.cloud.aiplatform_v1 import types as api
from google.protobuf import json_format
from google.protobuf.field_mask_pb2 import FieldMask

from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.google_cloud.client import (
    Place,
    beta_endpoint_client,
    credentials_for,
    endpoint,
    endpoint_client,
    operations_client,
    translate_errors,
)
from vlmpipe.google_cloud.retries import send_once, send_request
from vlmpipe.serving.openai import Answer, ChatServer
from vlmpipe.serving.questions import Chat, ValidationQuestion
from vlmpipe.serving.request_size import require_small_requests
from vlmpipe.serving.waking import answer_once_awake
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError

if TYPE_CHECKING:
    from google.api_core.operation import Operation
    from google.auth.credentials import Credentials
    from proto import Message

POLLING = DEFAULT_POLLING
SERVED_BY = "x-vertex-ai-deployed-model-id"
OVERLOOKED = 1e-6  # chance that a model which takes its share never answers a question
SHORT_S = 600.0  # operations that move no model
GRACE_S = 300.0  # after deploy.deployment_timeout_s, within which the service itself reports why a deployment failed
# Largest request: docs.cloud.google.com, Vertex AI, "Choose an endpoint type", read on 2026-11-28.
SHARED_MAX_BYTES, DEDICATED_MAX_BYTES = 1_500_000, 10_000_000


@dataclass(frozen=True)
class Served:
    """A model that takes part of an endpoint's traffic. before: the split without it."""

    endpoint: str
    deployed_id: str
    share: int
    before: Mapping[str, int]


class VertexEndpoint:
    """The endpoint of a run's deploy section."""

    def __init__(self, place: Place, deploy: DeployConfig, *, labels: Mapping[str, str], encryption_key: str) -> None:
        self._place, self._deploy = place, deploy
        self._labels, self._encryption_key = labels, encryption_key
        self.name = f"{place.parent}/endpoints/{deploy.endpoint}"
        self._client = endpoint_client(place.location)

    def require_public(self, questions: Sequence[ValidationQuestion], name: str) -> None:
        """Raise UserError unless the endpoint can be asked these questions from anywhere, before anything is deployed.

        64 for a private endpoint, 65 for questions that are larger than a request may be.
        """
        with translate_errors(self._place, what="endpoint"):
            current = self._get()
        if current and (current.network or current.private_service_connect_config.enable_private_service_connect):
            raise ConfigError(
                f"{self.name} is a private endpoint, which takes requests in its own network only",
                expected="a public endpoint: the new model is asked validation questions before it gets its traffic",
                fix="name another endpoint in deploy.endpoint, which is then made",
            )
        is_shared = current is not None and not current.dedicated_endpoint_enabled
        kind, max_bytes = ("shared", SHARED_MAX_BYTES) if is_shared else ("dedicated", DEDICATED_MAX_BYTES)
        larger = "name another endpoint in deploy.endpoint: a new one is dedicated and takes 10 MB; or " * is_shared
        require_small_requests(questions, name, self.name, max_bytes, limit_of=f"a {kind} endpoint", fix=larger)

    @contextlib.contextmanager
    def canary(self, model: str, title: str) -> Iterator[Served]:
        """Deploy `model` (a version's resource name) for the block, which tests it with its share of the traffic.

        When the block raises, nothing of it is left: the traffic is split as before, and an endpoint that was made for
        it is gone. An attempt that ended halfway is found by its title and continued.
        """
        with translate_errors(self._place, what="endpoint"):
            result = self._get()
            made = result is None
            current = result or self._create()
            before = {
                model_id: share
                for model_id, share in current.traffic_split.items()
                if model_id not in _titled(current, title)
            }
            before = scaled(before, 100)
        try:
            with translate_errors(self._place, what="endpoint"):
                served = self._deployed(current, model, title, before)
            yield served
        except BaseException:
            with translate_errors(self._place, what="endpoint"):
                self._undo(title, before, made)
            raise

    def ask(self, served: Served, name: str) -> Callable[[Chat, int], Answer]:
        """A function that asks the new model, by the name that its server knows."""
        address = self._address()
        server = ChatServer(f"{address}/v1/{served.endpoint}:rawPredict", name, Headers(credentials_for(address)))
        attempts = 1 if served.share == 100 else math.ceil(math.log(OVERLOOKED) / math.log(1 - served.share / 100))

        def ask(messages: Chat, max_new_tokens: int) -> Answer:
            for _ in range(attempts):
                answer = answer_once_awake(lambda: server.ask(messages, max_new_tokens), sleeps=self._deploy.sleeps)
                if answer.headers.get(SERVED_BY) == served.deployed_id:
                    return answer
            raise UserError(
                f"{attempts} requests to {served.endpoint}, and none was answered by the new model",
                expected=f"about {served.share} % of them, its share of the traffic",
                code=ExitCode.UNAVAILABLE,
            )

        return ask

    def promote(self, served: Served) -> dict[str, int]:
        """Give the new model its final share; models without any are undeployed. Returns the split."""
        share = self._deploy.traffic_percent if served.before else 100
        split = {served.deployed_id: share, **scaled(served.before, 100 - share)}
        with translate_errors(self._place, what="endpoint"):
            self._split(split)
            left = self._get()
            for deployed in left.deployed_models if left else ():
                if not split.get(deployed.id):
                    self._undeploy(deployed.id, {})
        return {model_id: percent for model_id, percent in split.items() if percent}

    # ---- Vertex AI

    def _address(self) -> str:
        """Where the endpoint takes requests. Raises UserError (69) for a dedicated one that has no address yet."""
        with translate_errors(self._place, what="endpoint"):
            current = self._get()
        if current is None or not current.dedicated_endpoint_enabled:
            return _with_scheme(endpoint(self._place.location))
        if not current.dedicated_endpoint_dns:
            raise UserError(
                f"{self.name} is a dedicated endpoint without an address",
                expected="dedicated_endpoint_dns, which the service sets",
                fix="run the step again",
                code=ExitCode.UNAVAILABLE,
            )
        return _with_scheme(current.dedicated_endpoint_dns)

    def _deployed(self, current: api.Endpoint, model: str, title: str, before: Mapping[str, int]) -> Served:
        share = self._deploy.canary_percent if before else 100
        if known := _titled(current, title):
            (deployed_id,) = known
            self._split({deployed_id: share, **scaled(before, 100 - share)})
            return Served(current.name, deployed_id, share, before)
        deploy = self._deploy
        machine = api.MachineSpec(machine_type=deploy.machine_type)
        if deploy.accelerator_count:
            machine.accelerator_type = api.AcceleratorType[deploy.accelerator_type]
            machine.accelerator_count = deploy.accelerator_count
        resources = api.DedicatedResources(
            machine_spec=machine, min_replica_count=deploy.min_replicas, max_replica_count=deploy.max_replicas
        )
        deployed = api.DeployedModel(model=model, display_name=title, dedicated_resources=resources)
        if self._place.service_account:
            deployed.service_account = self._place.service_account
        request = api.DeployModelRequest(
            endpoint=current.name, deployed_model=deployed, traffic_split={"0": share, **scaled(before, 100 - share)}
        )
        sent, kind = self._send(request)
        try:
            answer = self._finished(sent, kind, self._deploy.deployment_timeout_s + GRACE_S)
        except BaseException:  # until it ends, the endpoint does not list the model, and `_undo` does not find it
            self._cancel(sent)
            raise
        return Served(current.name, answer.deployed_model.id, share, before)

    def _send(self, request: api.DeployModelRequest) -> tuple[Operation, type[Message]]:
        """Begin a deployment. Returns its operation, and the message of the answer; v1 has no endpoint that sleeps."""
        if not self._deploy.sleeps:
            return send_once(self._client.deploy_model, request), api.DeployModelResponse
        from google.cloud.aiplatform_v1beta1 import types as beta

        client, sleeping = beta_endpoint_client(self._place.location), beta.DeployModelRequest()
        json_format.ParseDict(json_format.MessageToDict(type(request).pb(request)), type(sleeping).pb(sleeping))
        resources = sleeping.deployed_model.dedicated_resources
        resources.initial_replica_count = 1
        idle = timedelta(minutes=self._deploy.idle_minutes)
        resources.scale_to_zero_spec = beta.DedicatedResources.ScaleToZeroSpec(idle_scaledown_period=idle)
        return send_once(client.deploy_model, sleeping), beta.DeployModelResponse

    def _undo(self, title: str, before: Mapping[str, int], made: bool) -> None:
        current = self._get()
        if current is None:
            return
        for deployed_id in _titled(current, title):
            self._undeploy(deployed_id, before)
        if made:
            sent = send_request(self._client.delete_endpoint, name=self.name)
            self._finished(sent, None, SHORT_S)

    def _undeploy(self, deployed_id: str, split: Mapping[str, int]) -> None:
        request = api.UndeployModelRequest(endpoint=self.name, deployed_model_id=deployed_id, traffic_split=dict(split))
        self._finished(send_request(self._client.undeploy_model, request), api.UndeployModelResponse, SHORT_S)

    def _split(self, split: Mapping[str, int]) -> None:
        changed = api.Endpoint(name=self.name, traffic_split=dict(split))
        send_request(self._client.update_endpoint, endpoint=changed, update_mask=FieldMask(paths=["traffic_split"]))

    def _get(self) -> api.Endpoint | None:
        try:
            return send_request(self._client.get_endpoint, name=self.name)
        except exceptions.NotFound:
            return None

    def _create(self) -> api.Endpoint:
        requested = api.Endpoint(
            display_name=self._deploy.endpoint, labels=dict(self._labels), dedicated_endpoint_enabled=True
        )
        if self._encryption_key:
            requested.encryption_spec = api.EncryptionSpec(kms_key_name=self._encryption_key)
        request = api.CreateEndpointRequest(
            parent=self._place.parent, endpoint=requested, endpoint_id=self._deploy.endpoint
        )
        self._finished(send_once(self._client.create_endpoint, request), api.Endpoint, SHORT_S)
        result = self._get()
        if result is None:
            raise exceptions.InternalServerError(f"{self.name} was made and is not there")
        return result

    def _cancel(self, sent: Operation) -> None:
        """End a deployment, or print that it may still come about."""
        operation = from_gapic(sent.operation, operations_client(self._place.location), api.DeployModelResponse)
        try:
            if not operation.done():
                operation.cancel()
            operation.result(timeout=SHORT_S, polling=POLLING)
        except (TimeoutError, exceptions.RetryError):
            print(
                f"{sent.operation.name} was cancelled and has not ended: see that {self.name} gets no model", flush=True
            )
        except exceptions.GoogleAPICallError:  # it has ended without a model
            pass

    def _finished(self, sent: Operation, kind: type[Message] | None, timeout_s: float) -> Message:
        """The answer of a long-running operation."""
        from google.protobuf.empty_pb2 import Empty

        operation = from_gapic(sent.operation, operations_client(self._place.location), kind or Empty)
        try:
            return operation.result(timeout=timeout_s, polling=POLLING)
        except TimeoutError:
            raise UserError(
                f"an operation on {self.name} has not ended after {timeout_s:.0f} s: {operation.operation.name}",
                fix="look at the endpoint's log for what its container waits for, or raise deploy.deployment_timeout_s",
                code=ExitCode.UNAVAILABLE,
            ) from None


def _with_scheme(address: str) -> str:
    """The address as a URL: the service gives host names, and its documentation shows them with https://."""
    return address.rstrip("/") if "://" in address else f"https://{address}"


def _titled(current: api.Endpoint, title: str) -> list[str]:
    return [deployed_model.id for deployed_model in current.deployed_models if deployed_model.display_name == title]


def scaled(split: Mapping[str, int], total: int) -> dict[str, int]:
    """Scale the split to whole percent that add up to `total`; the largest shares take the rounding's rest."""
    whole = sum(split.values())
    if not whole:
        return {}
    result = {model_id: share * total // whole for model_id, share in split.items()}
    for model_id in sorted(split, key=lambda model_id: -split[model_id])[: total - sum(result.values())]:
        result[model_id] += 1
    return result


class Headers:
    """A token in the header of requests, renewed when it has run out; none for a server on this machine."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def __call__(self) -> dict[str, str]:
        from google.auth.transport.requests import Request

        headers: dict[str, str] = {}
        self._credentials.before_request(Request(), "POST", "", headers)
        return headers
