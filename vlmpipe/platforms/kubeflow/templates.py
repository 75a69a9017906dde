"""Published pipelines on Kubeflow: `vlmpipe publish --target kubeflow`. Its page starts and schedules runs of them."""

from __future__ import annotations

import json
from dataclasses import dataclass

import kfp_server_api

from vlmpipe.platforms.compiled import Compiled
from vlmpipe.platforms.kubeflow.runs.client import KubeflowApi
from vlmpipe.platforms.kubeflow.runs.version import require_version

PAGE_SIZE = 100


@dataclass(frozen=True)
class PublishedToKubeflow:
    """A version of a pipeline after `publish`."""

    compiled: Compiled
    link: str  # to its page
    version: str  # content-<fingerprint>
    uploaded: bool  # False: it was there already
    note: str = ""

    def as_json(self) -> dict[str, object]:
        return {
            "pipeline": str(self.compiled.path),
            "template": self.link,
            "version": self.version,
            "uploaded": self.uploaded,
            "notes": [self.note] if self.note else [],
        }

    def lines(self) -> list[str]:
        done = "published" if self.uploaded else "is there already"
        note = [f"  note: {self.note}"] if self.note else []
        return [f"{self.compiled.name} {done}: {self.link}", *note, f"  version   {self.version}"]


def publish_to_kubeflow(api: KubeflowApi, compiled: Compiled) -> PublishedToKubeflow:
    """Upload a compiled pipeline as a version of the pipeline of its name, unless that version is there.

    A version is named by the fingerprint of its file. Kubeflow starts the newest unless told another.
    Raises UserError where the service refuses. Repeating it completes the rest.
    """
    version = compiled.fingerprint()
    note = require_version(api, compiled.path)
    with api.translated("publish on"):
        pipeline = _pipeline(api, compiled.name)
        result = next((candidate for candidate in _versions(api, pipeline) if candidate.display_name == version), None)
        uploaded = result is None
        if result is None:
            result = api.client.upload_pipeline_version(str(compiled.path), version, pipeline_id=pipeline)
    page = f"{api.endpoint.rstrip('/')}/#/pipelines/details/{pipeline}/version/{result.pipeline_version_id}"
    return PublishedToKubeflow(compiled, page, version, uploaded, note)


def _pipeline(api: KubeflowApi, name: str) -> str:
    """Id of the pipeline of that name, which is made, empty, where there is none."""
    requested = json.dumps({"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]})
    answer = api.client.list_pipelines(page_size=PAGE_SIZE, filter=requested, namespace=api.namespace or None)
    if answer.pipelines:
        return str(answer.pipelines[0].pipeline_id)
    return str(api.client.create_pipeline(name, api.namespace).pipeline_id)


def _versions(api: KubeflowApi, pipeline: str) -> list[kfp_server_api.V2beta1PipelineVersion]:
    versions: list[kfp_server_api.V2beta1PipelineVersion] = []
    token = ""
    while True:
        answer = api.client.list_pipeline_versions(pipeline, page_token=token, page_size=PAGE_SIZE)
        versions += answer.pipeline_versions or []
        token = answer.next_page_token or ""
        if not token:
            return versions
