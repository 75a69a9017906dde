"""A gRPC front to the Vertex AI fake, for Google's clients with their default transport.

Each call becomes the REST request that the API's own annotations give for it, as in Google's front end, and is sent to
the fake; so both share one set of rules. A call without such a request is answered UNIMPLEMENTED.

    with FakeVertex() as vertex, grpc_front(vertex) as (address, calls):
        JobServiceGrpcTransport(channel=grpc.insecure_channel(address))
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import requests
from google.api_core.operation import Operation
from google.cloud.aiplatform_v1 import types
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2, json_format
from google.protobuf.message import Message

from tests.fakes.vertex.server import FakeVertex

METHOD = re.compile(r"/google\.cloud\.aiplatform\.v1\.(\w+)/(\w+)")
SERVICES = "google.cloud.aiplatform_v1.services"


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class _Front(grpc.GenericRpcHandler):
    def __init__(self, vertex: FakeVertex) -> None:
        self._vertex = vertex
        self.calls: list[str] = []

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        match = METHOD.fullmatch(call.method)
        if not match:
            return None
        service, method = match.groups()
        package = f"{SERVICES}.{_snake(service)}"
        rest = getattr(importlib.import_module(f"{package}.transports.rest_base"), f"_Base{service}RestTransport")
        client = getattr(importlib.import_module(package), f"{service}Client")
        if not hasattr(client, _snake(method)):
            return None
        request, answer = getattr(types, f"{method}Request"), _answer_of(client, method)

        def serve(message: Any, context: grpc.ServicerContext) -> Message:
            self.calls.append(f"{service}/{method}")
            form = getattr(rest, f"_Base{method}")
            sent = form._get_transcoded_request(form._get_http_options(), message)
            body = form._get_request_body_json(sent) if "body" in sent else None
            there = requests.request(
                sent["method"].upper(),
                self._vertex.endpoint + sent["uri"],
                params=form._get_query_params_json(sent),
                data=body,
                timeout=30,
            )
            content = json.loads(there.content)
            if there.status_code != 200:
                error = content["error"]
                context.abort(grpc.StatusCode[error["status"]], error["message"])
            found: Message = json_format.ParseDict(content, answer())
            return found

        return grpc.unary_unary_rpc_method_handler(serve, request.deserialize, lambda found: found.SerializeToString())


def _answer_of(client: type, method: str) -> type[Message]:
    """The message that a method answers with, from what its client returns."""
    returned = inspect.signature(getattr(client, _snake(method))).return_annotation
    if returned is None:
        return empty_pb2.Empty
    if returned is Operation:
        return operations_pb2.Operation
    if not hasattr(types, returned.__name__):  # a pager
        returned = getattr(types, f"{method}Response")
    return type(returned.pb(returned()))


@contextlib.contextmanager
def grpc_front(vertex: FakeVertex) -> Iterator[tuple[str, list[str]]]:
    """Address of a gRPC front to `vertex`, and the calls that arrived so far."""
    front = _Front(vertex)
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, handlers=[front])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}", front.calls
        finally:
            server.stop(None).wait()
