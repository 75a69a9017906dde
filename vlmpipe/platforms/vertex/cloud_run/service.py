"""A registered model on a private Cloud Run service: with a share of the traffic while it is tested, then with its own.

A revision with a tag has an address of its own, where the new model alone answers. The service lets callers in by IAM
(run.routes.invoke); one that is open to everybody is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.api_core import exceptions
from google.api_core.future.polling import DEFAULT_POLLING
from google.cloud.run_v2 import types as api
from google.iam.v1.iam_policy_pb2 import GetIamPolicyRequest
from google.protobuf.field_mask_pb2 import FieldMask

from vlmpipe.config.sections.cloud_run import TAG, load_cloud_run
from vlmpipe.config.sections.deploy import CHAT_ROUTE, DeployConfig
from vlmpipe.google_cloud.client import Place
from vlmpipe.google_cloud.retries import send_once, send_request
from vlmpipe.platforms.vertex.cloud_run.client import caller_headers, cloud_run_errors, services_client
from vlmpipe.platforms.vertex.cloud_run.form import Instance
from vlmpipe.platforms.vertex.endpoint import GRACE_S, SHORT_S, scaled
from vlmpipe.serving.agreement import Ask
from vlmpipe.serving.openai import ChatServer
from vlmpipe.serving.questions import ValidationQuestion
from vlmpipe.serving.request_size import require_small_requests
from vlmpipe.serving.waking import answer_once_awake
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, print_warning

POLLING = DEFAULT_POLLING
# Annotation of a service until its first model has passed its test: the run that has deployed last, and may delete it.
MADE_BY = "vlmpipe/made-by-run"
EVERYBODY = {"allUsers", "allAuthenticatedUsers"}
LATEST = api.TrafficTargetAllocationType.TRAFFIC_TARGET_ALLOCATION_TYPE_LATEST
REVISION = api.TrafficTargetAllocationType.TRAFFIC_TARGET_ALLOCATION_TYPE_REVISION


@dataclass(frozen=True)
class Candidate:
    """A revision under test. before: targets of the traffic without it, by revision, with tags that have no share."""

    revision: str
    address: str  # of the revision alone
    service_address: str
    before: tuple[api.TrafficTarget, ...]


class CloudRunService:
    """The service of a run's deploy section."""

    def __init__(self, place: Place, deploy: DeployConfig, *, labels: Mapping[str, str], encryption_key: str) -> None:
        self._place, self._deploy, self._labels = place, deploy, dict(labels)
        self._instance = Instance(deploy, place.service_account, encryption_key, dict(labels))
        self.name = f"{place.parent}/services/{deploy.endpoint}"
        self._client = services_client()

    def require_usable(self, questions: Sequence[ValidationQuestion], name: str) -> None:
        """Raise UserError before anything is deployed.

        64 for a service that everybody may call, that takes no requests from here, or that has nothing to give its
        traffic back to; 65 for questions that are larger than a request may be.
        """
        with cloud_run_errors(self._place):
            current = self._get()
            policy = current and send_request(self._client.get_iam_policy, GetIamPolicyRequest(resource=self.name))
        members = {member for binding in policy.bindings for member in binding.members} if policy else set()
        if current and (current.invoker_iam_disabled or EVERYBODY & members):
            raise ConfigError(
                f"everybody may call {self.name}",
                expected="a service whose callers have roles/run.invoker, without allUsers, with the IAM check on",
                fix="take the access away, or name another service in deploy.endpoint, which is then made private",
            )
        if current and current.ingress not in (
            api.IngressTraffic.INGRESS_TRAFFIC_ALL,
            api.IngressTraffic.INGRESS_TRAFFIC_UNSPECIFIED,
        ):
            raise ConfigError(
                f"{self.name} takes requests of its own network only ({current.ingress.name})",
                expected="a service that the pipeline's step can ask: it tests the new model",
                fix="name another service in deploy.endpoint, which is then made",
            )
        if current and MADE_BY not in current.annotations and not any(_names_of(current)):
            raise ConfigError(
                f"no revision of {self.name} is ready, so that a model which fails its test could not give the traffic "
                "back",
                expected="a service whose revisions take its traffic, or none of that name",
                fix="delete it, or name another service in deploy.endpoint, which is then made",
            )
        require_small_requests(
            questions, name, self.name, load_cloud_run().max_request_bytes, limit_of="a Cloud Run service"
        )

    @contextlib.contextmanager
    def canary(self, arguments: Sequence[str], run_id: str) -> Iterator[Candidate]:
        """Serve the model that vLLM's `arguments` name for the block, which tests it with its share of the traffic.

        When the block raises, each revision has its share and its tags as before, by its name also where the service
        sent them to the latest one. A service that was made for the model is gone, unless another run has deployed
        there since. A revision without traffic, which costs nothing, is left of another one.
        An attempt that ended halfway is continued.
        """
        template = self._instance.template(run_id, arguments)
        with cloud_run_errors(self._place):
            current = self._get()
            before = _without(current, template.revision)
        try:
            with cloud_run_errors(self._place):
                candidate = self._deployed(current, template, before, run_id)
            yield candidate
        except BaseException:
            with cloud_run_errors(self._place):
                self._undo(current, before, run_id)
            raise

    def ask(self, candidate: Candidate, name: str) -> Ask:
        """A function that asks the new model, by the name that its server knows."""
        with cloud_run_errors(self._place):
            headers = caller_headers(candidate.service_address)
        server = ChatServer(f"{candidate.address.rstrip('/')}{CHAT_ROUTE}", name, headers)
        # Also with a minimum of instances: those are shared out by traffic, and a small share may have none.
        return lambda messages, tokens: answer_once_awake(lambda: server.ask(messages, tokens), sleeps=True)

    def promote(self, candidate: Candidate) -> dict[str, int]:
        """Give the new model its final share and deploy's scaling; others without a share or a tag leave.

        Returns the split. Raises UserError (69) where another run has deployed since: the tag's address, which was
        asked, may have been that of its model.
        """
        share = self._deploy.traffic_percent if _takes_traffic(candidate.before) else 100
        traffic = [
            *(target for target in _shared(candidate.before, 100 - share) if target.percent or target.tag),
            api.TrafficTarget(type_=REVISION, revision=candidate.revision, percent=share),
        ]
        with cloud_run_errors(self._place):
            current = self._get()
            if current is None or candidate.revision not in _tagged(current):
                raise UserError(
                    f"{self.name} no longer has {candidate.revision} under test",
                    expected="one run at a time that deploys there",
                    fix="run the step again once the other run has ended",
                    code=ExitCode.UNAVAILABLE,
                )
            annotations = {name: text for name, text in current.annotations.items() if name != MADE_BY}
            changed = api.Service(
                traffic=traffic, annotations=annotations, scaling=self._scaling(current), etag=current.etag
            )
            self._update(changed, "traffic", "annotations", "scaling")
        split: dict[str, int] = {}
        for target in traffic:
            split[target.revision] = split.get(target.revision, 0) + target.percent
        return {revision: percent for revision, percent in split.items() if percent}

    # ---- Cloud Run

    def _deployed(
        self,
        current: api.Service | None,
        template: api.RevisionTemplate,
        before: tuple[api.TrafficTarget, ...],
        run_id: str,
    ) -> Candidate:
        share = self._deploy.canary_percent if _takes_traffic(before) else 100
        requested = api.Service(
            template=template,
            traffic=[*_shared(before, 100 - share), api.TrafficTarget(type_=LATEST, percent=share, tag=TAG)],
        )
        if current is None:
            requested.labels, requested.annotations = self._labels, {MADE_BY: run_id}
            requested.scaling = self._scaling(None)
            requested.ingress = api.IngressTraffic.INGRESS_TRAFFIC_ALL
            request = api.CreateServiceRequest(
                parent=self._place.parent, service=requested, service_id=self._deploy.endpoint
            )
            served = self._finished(
                send_once(self._client.create_service, request), self._deploy.deployment_timeout_s + GRACE_S
            )
        else:
            requested.etag = current.etag
            requested.annotations = dict(current.annotations)
            if MADE_BY in current.annotations:  # an attempt of another run ended halfway
                requested.annotations[MADE_BY] = run_id
            # As it was, as far as the new revision's most instances allow: a model that is refused keeps none.
            requested.scaling = api.ServiceScaling(current.scaling)
            requested.scaling.min_instance_count = min(current.scaling.min_instance_count, self._deploy.max_replicas)
            served = self._update(requested, "template", "scaling", "traffic", "annotations")
        ready = served.latest_ready_revision.rpartition("/")[2]
        addresses = [target.uri for target in served.traffic_statuses if target.tag == TAG and target.uri]
        if ready != template.revision or not addresses:
            why = served.terminal_condition.message or "no reason is said"
            raise UserError(
                f"{self.name} serves {ready or 'no revision'}: {why}",
                expected=f"the new revision {template.revision}, ready, with an address of its own",
                fix="look into the revision's log for what its container waits for",
                code=ExitCode.UNAVAILABLE,
            )
        return Candidate(template.revision, addresses[0], served.uri, before)

    def _scaling(self, current: api.Service | None) -> api.ServiceScaling:
        """The service's scaling, with the replicas of deploy."""
        scaling = api.ServiceScaling(current.scaling) if current else api.ServiceScaling()
        scaling.min_instance_count = self._deploy.min_replicas
        return scaling

    def _undo(self, former: api.Service | None, before: tuple[api.TrafficTarget, ...], run_id: str) -> None:
        """Take the candidate away: what another run or a person has made there since stays."""
        current = self._get()
        if current is None:
            return
        if _takes_traffic(before) and former:
            self._update(api.Service(traffic=before), "traffic")
            if current.scaling.min_instance_count < (minimum := former.scaling.min_instance_count):
                print_warning(
                    f"{self.name} keeps {current.scaling.min_instance_count} instances at least, and kept {minimum}: a "
                    f"revision of at most {self._deploy.max_replicas} (deploy.max_replicas) allows no more",
                    step="deploy-model",
                )
        elif current.annotations.get(MADE_BY) == run_id:
            request = api.DeleteServiceRequest(name=self.name, etag=current.etag)
            self._finished(send_request(self._client.delete_service, request), SHORT_S)

    def _update(self, changed: api.Service, *fields: str) -> api.Service:
        changed.name = self.name
        request = api.UpdateServiceRequest(service=changed, update_mask=FieldMask(paths=fields))
        timeout_s = self._deploy.deployment_timeout_s + GRACE_S if "template" in fields else SHORT_S
        return self._finished(send_once(self._client.update_service, request), timeout_s)

    def _get(self) -> api.Service | None:
        try:
            return send_request(self._client.get_service, name=self.name)
        except exceptions.NotFound:
            return None

    def _finished(self, operation: Any, timeout_s: float) -> api.Service:
        """The service after a long-running operation."""
        try:
            result: api.Service = operation.result(timeout=timeout_s, polling=POLLING)
        except TimeoutError:
            raise UserError(
                f"an operation on {self.name} has not ended after {timeout_s:.0f} s: {operation.operation.name}",
                fix="look into the log of its revision, or raise deploy.deployment_timeout_s",
                code=ExitCode.UNAVAILABLE,
            ) from None
        return result


def _tagged(current: api.Service) -> set[str]:
    """The revisions at the tag's address."""
    return {_revision_of(target, current) for target in current.traffic_statuses if target.tag == TAG}


def _names_of(current: api.Service) -> list[str]:
    return [_revision_of(target, current) for target in current.traffic_statuses]


def _revision_of(target: api.TrafficTargetStatus, current: api.Service) -> str:
    """A service's revision; empty for the latest one where none is ready."""
    return str(target.revision or current.latest_ready_revision).rpartition("/")[2]


def _without(current: api.Service | None, revision: str) -> tuple[api.TrafficTarget, ...]:
    """The traffic to other revisions, each by its name, as the latest one is about to be another; and every tag that
    is not the step's, also of this revision.
    """
    if current is None:
        return ()
    targets = []
    for target in current.traffic_statuses:
        name = _revision_of(target, current)
        if not name or target.tag == TAG or (name == revision and not target.tag):
            continue
        percent = 0 if name == revision else target.percent
        targets.append(api.TrafficTarget(type_=REVISION, revision=name, percent=percent, tag=target.tag))
    return tuple(_shared(targets, 100))


def _takes_traffic(targets: Sequence[api.TrafficTarget]) -> bool:
    return any(target.percent for target in targets)


def _shared(targets: Sequence[api.TrafficTarget], total: int) -> list[api.TrafficTarget]:
    """The targets with shares that add up to `total`, in their proportions."""
    shares = scaled({str(number): target.percent for number, target in enumerate(targets)}, total)
    return [
        api.TrafficTarget(
            type_=target.type_, revision=target.revision, percent=shares.get(str(number), 0), tag=target.tag
        )
        for number, target in enumerate(targets)
    ]
