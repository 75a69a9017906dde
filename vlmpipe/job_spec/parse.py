"""Strict parser of CustomJob specs: rejects what Vertex AI would reject or silently reinterpret.

The API's message types say which fields exist. Three things make a second look necessary: `google.protobuf` takes both
spellings of a name, proto-plus cuts 4.5 replicas to 4 and spreads a text over a list of letters, and neither knows the
roles of the worker pools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.cloud.aiplatform_v1.types import custom_job as api
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from trainer.errors import ConfigError
from vlmpipe.job_spec.schema import Kind, Problem, path_text, read_message
from vlmpipe.job_spec.worker_pools import CHIEF_POOL, EVALUATOR_POOL, REDUCTION_SERVER_POOL, WORKER_POOL, pool_problems

__all__ = ["CHIEF_POOL", "EVALUATOR_POOL", "REDUCTION_SERVER_POOL", "WORKER_POOL", "api_fields", "parse_job_spec"]

_SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: "int32",
    FieldDescriptor.CPPTYPE_INT64: "int64",
    FieldDescriptor.CPPTYPE_STRING: "text",
    FieldDescriptor.CPPTYPE_BOOL: "bool",
}


def parse_job_spec(spec: Mapping[str, Any]) -> api.CustomJobSpec:
    """`spec`, a mapping with the API's snake_case names, as the API's message.

    Whole numbers that arrive as floats are converted: a compiled pipeline stores 8 as 8.0. Raises ConfigError that
    names the path of the first unknown field, wrong enum name or wrong type, and for worker pools that Vertex AI would
    misunderstand (see `vlmpipe.job_spec.worker_pools`).
    """
    reading = read_message(spec)
    problems = [
        problem
        for problem in reading.problems
        if not (problem.kind == Kind.NUMBER_FORM and isinstance(problem.value, float))
    ]
    problems += pool_problems(reading.fields.get("worker_pool_specs", []), containers_only=True)
    if problems:
        raise _error(problems[0])
    return api.CustomJobSpec(reading.fields)


def api_fields() -> dict[str, Any]:
    """What `custom_job_fields.json` must hold, from the API client that is installed.

    What of a CustomJob lies outside its spec is named there and not described.
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


def _error(problem: Problem) -> ConfigError:
    path = path_text(problem.path)
    return ConfigError(f"{path} {problem.verb} {problem.found}", expected=problem.expected, fix=problem.fix)
