"""The registry in Vertex AI Model Registry: a version is a model version there, the champion is what an alias names.

The service has numbers, aliases and labels. The files and the values that the gate compares lie in the bucket, so that
the registry stays complete when a run is deleted:

    <root>/<MODEL_ID>/<run id>/model/         a copy of the export: the artifact_uri, which identifies a version
    <root>/<MODEL_ID>/<run id>/record.json    metrics, checkpoint and checksums, created once the copy is complete
    <root>/<MODEL_ID>/<run id>/SENT           an upload was sent: the next attempt looks for it before sending another
    <root>/<MODEL_ID>/MOVING-<alias>          lock while an alias is compared and moved, which takes several API calls
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from google.api_core import exceptions
from google.api_core.future.polling import DEFAULT_POLLING
from google.api_core.operation import from_gapic
from google.cloud.aiplatform_v1 import types as api

from vlmpipe.config.run_settings import RunSettings
from vlmpipe.config.sections.output import ServingConfig
from vlmpipe.config.serving_container import container_of
from vlmpipe.google_cloud.client import Place, model_client, operations_client, translate_errors
from vlmpipe.google_cloud.retries import PASSING, list_all, send_once, send_request
from vlmpipe.registry.folder import Candidate, Entry, Export, copy_quantized, overtaken
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import AlreadyExistsError, VersionConflictError, join_uri

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.services.model_service import ModelServiceClient

SCHEME = "vertex://"
RECORD, SENT = "record.json", "SENT"
UPLOAD_S = 600.0  # longest wait for an accepted upload: the service reads the files, but does not move them
SETTLE_S = 60.0  # how long an upload whose answer was lost may take to show among the versions
LOOK_S = 2.0  # between two looks
POLLING = DEFAULT_POLLING
ATTEMPTS = 3
LEASE_S = 120.0  # after which a lock counts as left over: the three requests under it take less
MAX_LABEL_CHARS = 63


class VertexRegistry:
    """The versions of one model of Vertex AI Model Registry. See `vlmpipe.registry.folder.Registry`."""

    def __init__(
        self,
        place: Place,
        model_id: str,
        root_uri: str,
        *,
        alias: str,
        serving: ServingConfig,
        quantized: str = "",
        labels: Mapping[str, str] | None = None,
        encryption_key: str = "",
    ) -> None:
        """`root_uri` is on gs://, `serving` is the container that serves a version, from its export of the format
        `quantized` where it has one.
        """
        self._place, self._model_id, self._alias = place, model_id, alias
        self._name = f"{place.parent}/models/{model_id}"
        self._store = open_storage(join_uri(root_uri, model_id))
        self._serving, self._quantized = serving, quantized
        self._labels, self._encryption_key = labels or {}, encryption_key
        self._client: ModelServiceClient = model_client(place.location)

    @classmethod
    def of(cls, settings: RunSettings, root_uri: str) -> VertexRegistry:
        """Return the registry of a run."""
        gcp, register = settings.gcp, settings.register_
        return cls(
            Place(gcp.project, gcp.location),
            register.registry.removeprefix(SCHEME),
            root_uri,
            alias=register.alias,
            serving=container_of(settings),
            quantized=(settings.deploy.quantized if settings.deploy else None) or "",
            labels=gcp.labels,
            encryption_key=gcp.encryption_spec_key_name,
        )

    def champion(self, model: str) -> Entry | None:
        """The version that the alias names, or None. Raises ConfigError for one that vlmpipe did not register."""
        with self._translated_errors():
            result = self._get(self._alias)
        return None if result is None else self._entry(result, model)

    def version(self, model: str, number: int) -> Entry | None:
        """The version of this number, or None where there is none. Raises ConfigError as `champion`."""
        with self._translated_errors():
            result = self._get(str(number))
        return None if result is None else self._entry(result, model)

    def versions(self, model: str) -> list[Entry]:
        """All versions that vlmpipe registered, oldest first."""
        with self._translated_errors():
            result = self._list()
        return [self._entry(version, model) for version in result if self._is_ours(version)]

    def register(self, model: str, candidate: Candidate, model_card: str) -> Entry:
        """Copy the candidate's export and `model_card`, and upload them as a new version, without the alias.

        A checkpoint of a run has one version: registering it again returns that version. Raises ConfigError where there
        is no export.
        """
        record = self._copied(candidate, model_card)
        with self._translated_errors():
            return self._entry(self._uploaded(model, candidate, record), model)

    def promote(self, model: str, version: int, *, instead_of: int | None) -> None:
        """Move the alias to `version` if it still names `instead_of` (None: it names none yet).

        Promoting the champion again changes nothing. A lock excludes other runs of vlmpipe between comparison and
        move, but not a person who moves the alias at that moment.
        """
        with self._translated_errors(), self._alone(version):
            current = self._get(self._alias)
            now = None if current is None else int(current.version_id)
            if now == version:
                return
            if now != instead_of:
                raise overtaken(self._alias, model, now, version, instead_of)
            request = api.MergeVersionAliasesRequest(name=f"{self._name}@{version}", version_aliases=[self._alias])
            send_request(self._client.merge_version_aliases, request)

    def arguments(self, number: int) -> tuple[str, ...]:
        """The arguments of a version's container; none where there is no such version."""
        with self._translated_errors():
            result = self._get(str(number))
        return tuple(result.container_spec.args) if result else ()

    # ---- files

    def _copied(self, candidate: Candidate, model_card: str) -> dict[str, object]:
        """The record of the run, made with the copy of its export where there is none yet."""
        folder = self._folder(candidate)
        name = f"{folder}/{RECORD}"
        if self._store.stat(name) is None:
            files = Export(candidate).copy(self._store, f"{folder}/model", model_card)
            quantized = copy_quantized(candidate, self._store, f"{folder}/model", model_card)
            record = {
                "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                "files": [file.model_dump() for file in files],
                "quantized": quantized,
                **candidate.model_dump(exclude={"export_uri", "quantized"}),
            }
            with contextlib.suppress(AlreadyExistsError):  # another attempt of this run was faster, with the same files
                self._store.create(name, json.dumps(record, indent=2).encode())
        stored: dict[str, object] = json.loads(self._store.read(name))
        return stored

    def _folder(self, candidate: Candidate) -> str:
        """Return the candidate's folder: the run's, or one inside it if another checkpoint was registered first."""
        name = f"{candidate.run_id}/{RECORD}"
        of_another = (
            self._store.stat(name) is not None
            and json.loads(self._store.read(name))["checkpoint"] != candidate.checkpoint
        )
        return f"{candidate.run_id}/{candidate.checkpoint}" if of_another else candidate.run_id

    def _entry(self, version: api.Model, model: str) -> Entry:
        if not self._is_ours(version):
            raise ConfigError(
                f"{self._name}@{version.version_id} was not registered by vlmpipe: no {RECORD} next to its model in "
                f"{version.artifact_uri or 'nowhere'}",
                expected=f"a version to compare with under the alias {self._alias}",
                fix="move the alias to a version that vlmpipe registered, or set register.alias to another one",
            )
        record = json.loads(open_storage(_parent(version.artifact_uri)).read(RECORD))
        return Entry(
            model=model,
            version=int(version.version_id),
            model_uri=version.artifact_uri,
            resource=f"{self._name}@{version.version_id}",
            **record,
        )

    def _is_ours(self, version: api.Model) -> bool:
        uri = version.artifact_uri
        return uri.startswith("gs://") and open_storage(_parent(uri)).stat(RECORD) is not None

    # ---- Vertex AI

    def _uploaded(self, model: str, candidate: Candidate, record: Mapping[str, object]) -> api.Model:
        """The run's version, uploaded if there is none. An upload whose answer was lost is looked for first."""
        folder = self._folder(candidate)
        uri, note = self._store.uri(f"{folder}/model"), f"{folder}/{SENT}"
        may_be_under_way = self._store.stat(note) is not None
        fault: Exception | None = None
        for _ in range(ATTEMPTS):
            if result := self._find(uri, wait_s=SETTLE_S if may_be_under_way else 0.0):
                return result
            self._store.write(note, dt.datetime.now(dt.UTC).isoformat().encode())
            may_be_under_way = True
            try:
                return self._upload(self._request(model, uri, record))
            except (*PASSING, exceptions.Conflict) as error:
                # A conflict: the model's first version, ours or another run's, was made meanwhile.
                fault = error
            except exceptions.GoogleAPICallError:
                self._store.delete(note)  # refused for good: nothing is under way
                raise
        assert fault
        raise fault

    def _upload(self, request: api.UploadModelRequest) -> api.Model:
        sent = send_once(self._client.upload_model, request)
        operations = operations_client(self._place.location)
        operation = from_gapic(sent.operation, operations, api.UploadModelResponse)
        try:
            answer = operation.result(timeout=UPLOAD_S, polling=POLLING)
        except TimeoutError:
            raise UserError(
                f"the upload to {self._name} has not ended after {UPLOAD_S:.0f} s: {operation.operation.name}",
                fix="run the step again: it finds that upload when it has ended",
                code=ExitCode.UNAVAILABLE,
            ) from None
        result = self._get(answer.model_version_id)
        if result is None:
            raise exceptions.InternalServerError(
                f"{self._name}@{answer.model_version_id} was uploaded and is not there"
            )
        return result

    def _request(self, model: str, uri: str, record: Mapping[str, Any]) -> api.UploadModelRequest:
        serving, served_uri = self._serving, record.get("quantized", {}).get(self._quantized, uri)
        container = api.ModelContainerSpec(
            image_uri=serving.image_uri,
            command=list(serving.command),
            args=[argument.replace("{model_uri}", served_uri) for argument in serving.args],
            env=[api.EnvVar(name=name, value=value) for name, value in serving.env.items()],
            ports=[api.Port(container_port=serving.port)],
            predict_route=serving.predict_route,
            health_route=serving.health_route,
        )
        if serving.shared_memory_size_mb:
            container.shared_memory_size_mb = serving.shared_memory_size_mb
        if serving.deployment_timeout_s:
            container.deployment_timeout = dt.timedelta(seconds=serving.deployment_timeout_s)
        score = record["metrics"].get("exact_match")
        version = api.Model(
            display_name=model,
            version_description=f"run {record['run_id']}" + (f", exact match {score:.4f}" if score is not None else ""),
            artifact_uri=uri,
            container_spec=container,
            labels={
                **self._labels,
                "vlmpipe-run": _label(record["run_id"]),
                "vlmpipe-data": _label(record["data_fingerprint"]),
            },
        )
        if self._encryption_key:
            version.encryption_spec = api.EncryptionSpec(kms_key_name=self._encryption_key)
        request = api.UploadModelRequest(parent=self._place.parent, model=version)
        if self._get("") is None:
            request.model_id = self._model_id
        else:
            request.parent_model = self._name
        return request

    def _find(self, uri: str, *, wait_s: float) -> api.Model | None:
        """The oldest version with these files, looked for until `wait_s` is over."""
        until_s = time.monotonic() + wait_s
        while True:
            for result in self._list():
                if result.artifact_uri == uri:
                    return result
            if time.monotonic() >= until_s:
                return None
            time.sleep(min(LOOK_S, wait_s))

    def _list(self) -> list[api.Model]:
        """All versions, oldest first; none where there is no such model."""
        try:
            result = list_all(self._client.list_model_versions, name=self._name)
            return sorted(result, key=lambda version: int(version.version_id))
        except exceptions.NotFound:
            return []

    def _get(self, version: str) -> api.Model | None:
        """The version of that number or alias; an empty one is the model's default version."""
        name = f"{self._name}@{version}" if version else self._name
        try:
            return send_request(self._client.get_model, name=name)
        except exceptions.NotFound:
            return None

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        with translate_errors(self._place, what="model"):
            yield

    @contextlib.contextmanager
    def _alone(self, version: int) -> Iterator[None]:
        """Exclude other runs from moving the alias inside the block. A second attempt for `version` takes over."""
        name = f"MOVING-{self._alias}"
        lease = json.dumps({"version": version, "until_s": time.time() + LEASE_S}).encode()
        try:
            self._store.create(name, lease)
        except AlreadyExistsError:
            self._take_over(name, version, lease)
        try:
            yield
        finally:
            self._store.delete(name)

    def _take_over(self, name: str, version: int, lease: bytes) -> None:
        info = self._store.stat(name)
        held = json.loads(self._store.read(name)) if info else {"version": version, "until_s": 0.0}
        if held["version"] == version or held["until_s"] < time.time():
            with contextlib.suppress(VersionConflictError):
                self._store.replace(name, lease, info.version if info else "")
                return
        raise UserError(
            f"another run is moving the alias {self._alias} of {self._name}: {self._store.uri(name)}",
            fix="run the step again in two minutes",
            code=ExitCode.UNAVAILABLE,
        )


def _parent(uri: str) -> str:
    return uri.rstrip("/").rpartition("/")[0]


def _label(text: str) -> str:
    """`text` as a label's value."""
    return re.sub(r"[^a-z0-9_-]", "-", text.lower())[:MAX_LABEL_CHARS]
