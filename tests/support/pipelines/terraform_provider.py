"""The Google provider as far as Terraform looks at it: its schema, over the plugin protocol, and nothing behind it.

`terraform validate` holds every argument to that schema, and `terraform test` mocks all resources by it. The registry,
which has the real provider, is out of a test's reach. Values are not checked, nor that computed ones are left alone:
the real provider does that.
It serves from the tests' own process, to which Terraform is told to connect: Terraform would otherwise start dozens of
providers for each of its commands. Protocol: hashicorp/terraform, docs/plugin-protocol/tfplugin6.proto.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

GIVEN = {"required": 4, "optional": 5, "computed": 6}  # fields of Schema.Attribute
NESTINGS = {"list": 2, "set": 3}  # Schema.NestedBlock.NestingMode
VARINT, BYTES = 0, 2  # protobuf's wire types


@contextlib.contextmanager
def served_provider(schema: Path) -> Iterator[dict[str, str]]:
    """Serve this provider. Returns the environment in which terraform asks it in place of Google's.

    It needs no `terraform init`, which would look for the real one; `terraform get` fetches modules.
    """
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((_Service(json.loads(schema.read_text(encoding="utf-8"))),))
    address = {"Network": "tcp", "String": f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"}
    served = {"Protocol": "grpc", "ProtocolVersion": 6, "Pid": os.getpid(), "Test": True, "Addr": address}
    server.start()
    try:
        yield {
            **os.environ,
            "TF_REATTACH_PROVIDERS": json.dumps({"registry.terraform.io/hashicorp/google": served}),
            "TF_CLI_CONFIG_FILE": os.devnull,
            "CHECKPOINT_DISABLE": "1",
            "TF_IN_AUTOMATION": "1",
            "GOGC": "400",  # a command lives for seconds: its garbage need not be looked for so often
        }
    finally:
        server.stop(None).wait()


def schema_response(schema: Mapping[str, Any]) -> bytes:
    """GetProviderSchema.Response."""
    return (
        _field(1, _schema(schema["provider"]))
        + b"".join(_entry(2, name, _schema(block)) for name, block in schema["resource"].items())
        + b"".join(_entry(3, name, _schema(block)) for name, block in schema["data"].items())
    )


def _schema(block: Mapping[str, Any]) -> bytes:
    return _field(2, _block(block))


def _block(block: Mapping[str, Any]) -> bytes:
    attributes = (_attribute(name, *kind) for name, kind in block["attributes"].items())
    nested = (
        _field(1, name.encode())
        + _field(2, _block(inner))
        + _number(3, NESTINGS[inner["nesting"]])
        + _number(4, inner["min_items"])
        + _number(5, inner["max_items"])
        for name, inner in block["blocks"].items()
    )
    return b"".join(_field(2, one) for one in attributes) + b"".join(_field(3, one) for one in nested)


def _attribute(name: str, kind: Any, given: str) -> bytes:
    marks = b"".join(_number(GIVEN[one], 1) for one in given.split(", "))
    return _field(1, name.encode()) + _field(2, json.dumps(kind).encode()) + marks


def _entry(number: int, key: str, value: bytes) -> bytes:
    return _field(number, _field(1, key.encode()) + _field(2, value))


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | BYTES) + _varint(len(value)) + value


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


class _Service(grpc.GenericRpcHandler):
    """Answers what validation and mocked tests ask. Any other call, such as one that would create, is unimplemented."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._answers = {
            "/tfplugin6.Provider/GetProviderSchema": schema_response(schema),
            **{
                f"/tfplugin6.Provider/{name}": b""  # no diagnostics
                for name in (
                    "ValidateProviderConfig",
                    "ValidateResourceConfig",
                    "ValidateDataResourceConfig",
                    "StopProvider",
                )
            },
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method not in self._answers:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: self._answers[details.method])
