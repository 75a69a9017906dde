"""The metadata store of the Vertex AI fake, as far as experiments use it: contexts, and which belong to which.

Rules are those that the messages of MetadataService state.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from typing import Any

from google.cloud.aiplatform_v1 import types as api
from google.protobuf import json_format

from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.messages import as_dict, parse, refuse_output_only
from vlmpipe.rehearsal.vertex.rules import check_labels

CONTEXT_ID = re.compile(r"[a-z0-9-]{4,128}")
SCHEMAS = {"system.Experiment": "0.0.1", "system.ExperimentRun": "0.0.1"}
OUTPUT_ONLY = {"name", "create_time", "update_time", "parent_contexts", "etag"}
MAX_METADATA_BYTES = 200_000
MAX_PARENTS = 10
STORE = "default"
PATH = re.compile(
    r"/v1/(projects/[^/]+/locations/[^/]+)/metadataStores(?:/([^/:]+))?(?:/([a-z]+)(?:/([^/:]+))?)?(?::([a-zA-Z]+))?"
)


class MetadataStore:
    """State in memory. `has_store`: whether the default metadata store was created."""

    def __init__(self, parent: str) -> None:
        self.contexts: dict[str, api.Context] = {}
        self.has_store = False
        self._root = f"{parent}/metadataStores"

    def answer(self, method: str, match: re.Match[str], query: dict[str, str], body: bytes) -> dict[str, Any]:
        """The request to a path that PATH matched."""
        _, store, kind, name, verb = match.groups()
        if kind is None and verb is None:
            return self._stores(method, store, query, body)
        if not self.has_store or store != STORE:
            raise ApiError(404, f"MetadataStore {store} does not exist")
        if kind in ("artifacts", "executions") and method == "GET" and name:
            raise ApiError(404, f"{self._root}/{store}/{kind}/{name} does not exist")  # this fake keeps none
        routes: dict[tuple[str, bool, str | None], Callable[[], dict[str, Any]]] = {
            ("POST", False, None): lambda: self._create(query.get("contextId", ""), body),
            ("GET", True, None): lambda: as_dict(self._known(name)),
            ("PATCH", True, None): lambda: self._update(name, query, body),
            ("POST", True, "addContextChildren"): lambda: self._add_children(name, body),
        }
        if kind != "contexts" or (route := routes.get((method, bool(name), verb))) is None:
            raise ApiError(501, f"no such route in this fake: {method} metadataStores/{store}/{kind} {verb}")
        return route()

    def _stores(self, method: str, store: str | None, query: dict[str, str], body: bytes) -> dict[str, Any]:
        if method == "GET" and store == STORE and self.has_store:
            return {"name": f"{self._root}/{STORE}"}
        if method == "GET" and store:
            raise ApiError(404, f"MetadataStore {store} does not exist")
        if method != "POST" or query.get("metadataStoreId") != STORE:
            raise ApiError(501, f"no such route in this fake: {method} metadataStores {query}")
        parse(api.MetadataStore, body)
        self.has_store = True
        kind = "type.googleapis.com/google.cloud.aiplatform.v1.MetadataStore"
        answer = {"@type": kind, "name": f"{self._root}/{STORE}"}
        return {"name": f"{self._root}/{STORE}/operations/1", "done": True, "response": answer}

    def _create(self, context_id: str, body: bytes) -> dict[str, Any]:
        context = parse(api.Context, body)
        if not CONTEXT_ID.fullmatch(context_id):
            raise ApiError(400, f"context_id: {context_id!r} does not match {CONTEXT_ID.pattern}")
        refuse_output_only(context, OUTPUT_ONLY)
        if SCHEMAS.get(context.schema_title) != context.schema_version:
            raise ApiError(400, f"schema {context.schema_title} {context.schema_version} is not registered")
        self._check(context)
        context.name = f"{self._root}/{STORE}/contexts/{context_id}"
        if context.name in self.contexts:
            raise ApiError(409, f"Context {context.name} already exists")
        context.create_time = dt.datetime.now(dt.UTC)
        return self._keep(context)

    def _update(self, name: str, query: dict[str, str], body: bytes) -> dict[str, Any]:
        before, context = self._known(name), parse(api.Context, body)
        if query.get("updateMask"):
            raise ApiError(501, "this fake knows no update mask")
        if context.etag and context.etag != before.etag:
            raise ApiError(409, f"Specified Context `etag`: `{context.etag}` does not match `{before.etag}`")
        if (context.schema_title, context.schema_version) != (before.schema_title, before.schema_version):
            raise ApiError(400, "schema_title and schema_version cannot be changed")
        self._check(context)
        context.name, context.create_time = before.name, before.create_time
        context.parent_contexts = before.parent_contexts
        return self._keep(context)

    def _add_children(self, name: str, body: bytes) -> dict[str, Any]:
        parent, request = self._known(name), parse(api.AddContextChildrenRequest, body)
        for child_name in request.child_contexts:
            child = self._known(child_name.rpartition("/")[2])
            if child.name == parent.name or child.name in parent.parent_contexts:
                raise ApiError(400, f"{child.name} cannot be a child of {parent.name}: a cycle")
            if parent.name not in child.parent_contexts:
                child.parent_contexts = [*child.parent_contexts, parent.name]
            if len(child.parent_contexts) > MAX_PARENTS:
                raise ApiError(400, f"{child.name} has more than {MAX_PARENTS} parents")
        return {}

    def _check(self, context: api.Context) -> None:
        check_labels(context.labels)
        if len(context.display_name) > 128:
            raise ApiError(400, "display_name: more than 128 characters")
        size = len(json_format.MessageToJson(api.Context.pb(context).metadata).encode())
        if size > MAX_METADATA_BYTES:
            raise ApiError(400, f"metadata: {size} bytes are more than {MAX_METADATA_BYTES}")

    def _keep(self, context: api.Context) -> dict[str, Any]:
        context.update_time = dt.datetime.now(dt.UTC)
        context.etag = str(int(context.etag or 0) + 1)
        self.contexts[context.name] = context
        return as_dict(context)

    def _known(self, name: str) -> api.Context:
        full = f"{self._root}/{STORE}/contexts/{name}"
        if full not in self.contexts:
            raise ApiError(404, f"Context {full} does not exist")
        return self.contexts[full]
