"""Strict reading of a CustomJob's spec: what Vertex AI would refuse or take otherwise is refused here in words.

The API's message types say which fields exist. Three things make a second look necessary: `google.protobuf` takes both
spellings of a name, proto-plus cuts 4.5 replicas to 4 and spreads a text over a list of letters, and neither knows the
roles of the worker pools.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from google.cloud.aiplatform_v1.types import custom_job as api
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from trainer.errors import ConfigError

CHIEF_POOL, WORKER_POOL, REDUCTION_SERVER_POOL, EVALUATOR_POOL = range(4)
REDUCTION_SERVER_IMAGE = "reductionserver"

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
}
_PLAIN: dict[int, tuple[type | tuple[type, ...], str]] = {
    FieldDescriptor.CPPTYPE_STRING: (str, "text"),
    FieldDescriptor.CPPTYPE_BOOL: (bool, "true or false"),
    FieldDescriptor.CPPTYPE_FLOAT: ((int, float), "a number"),
    FieldDescriptor.CPPTYPE_DOUBLE: ((int, float), "a number"),
}


def parse_job_spec(spec: Mapping[str, Any]) -> api.CustomJobSpec:
    """`spec`, a mapping with the API's snake_case names, as the API's message.

    Whole numbers that arrive as floats are converted: a compiled pipeline stores 8 as 8.0. Raises ConfigError that
    names the path of the first unknown field, wrong enum name or wrong type, and for worker pools that Vertex AI would
    misunderstand (see `check_pools`).
    """
    message = api.CustomJobSpec(_message(spec, api.CustomJobSpec.pb(api.CustomJobSpec()).DESCRIPTOR, "job_spec"))
    check_pools(message.worker_pool_specs)
    return message


def check_pools(pools: Sequence[api.WorkerPoolSpec]) -> None:
    """Raise ConfigError unless the pools have the roles that Vertex AI gives to their positions.

    Pool 0 is the chief alone, 1 the workers, 2 the Reduction Server and 3 the evaluators. No pool may be empty: the
    pipeline component's launcher drops an empty one, and those behind it move up into other roles.
    """
    if not pools:
        raise ConfigError("worker_pool_specs is empty", expected="at least pool 0, the chief")
    if len(pools) > EVALUATOR_POOL + 1:
        raise ConfigError(
            f"worker_pool_specs has {len(pools)} pools", expected="at most 4: chief, workers, reducers, evaluators"
        )
    for index, pool in enumerate(pools):
        where = f"worker_pool_specs[{index}]"
        if index == CHIEF_POOL and pool.replica_count != 1:
            raise ConfigError(
                f"{where}.replica_count is {pool.replica_count}",
                expected="exactly 1: pool 0 is the chief",
                fix="move the other replicas to worker_pool_specs[1]",
            )
        if pool.replica_count < 1:
            raise ConfigError(
                f"{where} has no replica",
                expected="at least 1: an empty pool is dropped, and the pools behind it take other roles",
                fix="a Reduction Server needs at least 2 nodes, so that pool 1 is not empty",
            )
        if not pool.machine_spec.machine_type:
            raise ConfigError(
                f"{where}.machine_spec.machine_type is missing", expected="a machine type such as g2-standard-8"
            )
        image = pool.container_spec.image_uri
        if not image:
            raise ConfigError(f"{where}.container_spec.image_uri is missing", expected="an image in Artifact Registry")
        if REDUCTION_SERVER_IMAGE in image and index != REDUCTION_SERVER_POOL:
            raise ConfigError(
                f"{where} runs the Reduction Server image",
                expected="it in pool 2, the only place where it has that role",
            )


def _message(value: Any, descriptor: Descriptor, path: str) -> Any:
    if descriptor.full_name == "google.protobuf.Duration":
        if not isinstance(value, str) or not re.fullmatch(r"[0-9]+(\.[0-9]{1,9})?s", value):
            raise ConfigError(f"{path} is {value!r}", expected='a duration in seconds, for example "3600s"')
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is {value!r}", expected=f"an object with fields of {descriptor.name}")
    cleaned = {}
    for name, inner in value.items():
        if name not in descriptor.fields_by_name:
            raise _unknown_field(name, descriptor, path)
        cleaned[name] = _field(inner, descriptor.fields_by_name[name], f"{path}.{name}")
    return cleaned


def _field(value: Any, field: FieldDescriptor, path: str) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} is {value!r}", expected="an object")
        return {
            key: _single(inner, field.message_type.fields_by_name["value"], f"{path}.{key}")
            for key, inner in value.items()
        }
    if not field.is_repeated:
        return _single(value, field, path)
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{path} is {value!r}", expected="a list")
    return [_single(item, field, f"{path}[{index}]") for index, item in enumerate(value)]


def _single(value: Any, field: FieldDescriptor, path: str) -> Any:
    if field.message_type is not None:
        return _message(value, field.message_type, path)
    if field.enum_type is not None:
        names = [item.name for item in field.enum_type.values]
        if value not in names:
            raise ConfigError(
                f"{path} is {value!r}", expected=f"a {field.enum_type.name}{_did_you_mean(str(value), names)}"
            )
        return value
    if field.cpp_type in _INTEGERS:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise ConfigError(f"{path} is {value!r}", expected="a whole number")
        return int(value)
    kind, name = _PLAIN[field.cpp_type]
    if not isinstance(value, kind):
        raise ConfigError(f"{path} is {value!r}", expected=name)
    return value


def _unknown_field(name: str, descriptor: Descriptor, path: str) -> ConfigError:
    snake = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", str(name)).lower()
    known = list(descriptor.fields_by_name)
    fix = f"write {snake}: this API client takes snake_case" if snake in known and snake != name else ""
    return ConfigError(
        f"{path}.{name} is no field of {descriptor.name}",
        expected=f"one of {', '.join(known)}{'' if fix else _did_you_mean(snake, known)}",
        fix=fix,
    )


def _did_you_mean(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.upper(), [item.upper() for item in known], n=1)
    return f"; did you mean {next(item for item in known if item.upper() == close[0])}?" if close else ""
