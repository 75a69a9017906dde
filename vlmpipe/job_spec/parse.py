"""Strict parser of CustomJob specs into the API's message.

Stricter than the API client: `google.protobuf` accepts both spellings of a name, proto-plus truncates 4.5 replicas to 4
and splits a text into a list of letters, and neither knows the roles of the worker pools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.cloud.aiplatform_v1.types import custom_job as api
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from trainer.errors import ConfigError
from vlmpipe.job_spec.rules.base import Pool
from vlmpipe.job_spec.rules.worker_pools import role_violations
from vlmpipe.job_spec.schema import read_message
from vlmpipe.job_spec.violation import path_text
from vlmpipe.job_spec.worker_pools import POOLS

_SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: "int32",
    FieldDescriptor.CPPTYPE_INT64: "int64",
    FieldDescriptor.CPPTYPE_STRING: "text",
    FieldDescriptor.CPPTYPE_BOOL: "bool",
}


def parse_job_spec(spec: Mapping[str, Any]) -> api.CustomJobSpec:
    """`spec`, with the API's snake_case names, as the API's message.

    Whole floats become integers: a compiled pipeline stores 8 as 8.0.

    Raises ConfigError for the first violation of form or of the worker pools' roles.
    """
    reading = read_message(spec, whole_floats=True)
    pools = [Pool(index, pool) for index, pool in enumerate(reading.fields.get(POOLS, []))]
    violations = [*reading.violations, *role_violations(pools, containers_only=True)]
    if violations:
        first = violations[0]
        raise ConfigError(f"{path_text(first.field)}: found {first.found}", expected=first.expected, fix=first.fix)
    return api.CustomJobSpec(reading.fields)


def api_fields() -> dict[str, Any]:
    """The content of `custom_job_fields.json` for the installed API client.

    Fields of a CustomJob beside its spec have the type "any".
    """
    messages: dict[str, dict[str, str]] = {}
    enums: dict[str, list[str]] = {}
    _describe(api.CustomJobSpec.pb(api.CustomJobSpec()).DESCRIPTOR, messages, enums)
    job = api.CustomJob.pb(api.CustomJob()).DESCRIPTOR
    messages[job.name] = {
        field.name: field.message_type.name if field.name == "job_spec" else "any" for field in job.fields
    }
    return {"messages": messages, "enums": enums}


def _describe(descriptor: Descriptor, messages: dict[str, dict[str, str]], enums: dict[str, list[str]]) -> None:
    fields = messages.setdefault(descriptor.name, {})
    for field in descriptor.fields:
        inner = field.message_type
        if inner is not None and inner.full_name == "google.protobuf.Duration":
            kind = "duration"
        elif inner is not None:
            kind = inner.name
            if kind not in messages:
                _describe(inner, messages, enums)
        elif field.enum_type is not None:
            kind = field.enum_type.name
            enums[kind] = [item.name for item in field.enum_type.values]
        else:
            kind = _SCALARS[field.cpp_type]
        fields[field.name] = f"[{kind}]" if field.is_repeated else kind
