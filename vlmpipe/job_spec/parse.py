"""Strict parser of CustomJob specs into the API's message.

Stricter than the API client: `google.protobuf` accepts both spellings of a name, proto-plus truncates 4.5 replicas to 4
and splits a text into a list of letters, and neither knows the roles of the worker pools.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.cloud.aiplatform_v1.types import custom_job as api

from vlmpipe.job_spec.rules.base import Pool
from vlmpipe.job_spec.rules.worker_pools import role_violations
from vlmpipe.job_spec.schema import read_message
from vlmpipe.job_spec.violation import path_text
from vlmpipe.trainer.errors import ConfigError


def parse_job_spec(spec: Mapping[str, object]) -> api.CustomJobSpec:
    """`spec`, with the API's snake_case names, as the API's message.

    Whole floats become integers: a compiled pipeline stores 8 as 8.0.

    Raises ConfigError for the first violation of form or of the worker pools' roles.
    """
    reading = read_message(spec, whole_floats=True)
    pools = [Pool(index, pool) for index, pool in enumerate(reading.spec.get("worker_pool_specs", ()))]
    violations = [*reading.violations, *role_violations(pools)]
    if violations:
        first = violations[0]
        raise ConfigError(f"{path_text(first.field)}: found {first.found}", expected=first.expected, fix=first.fix)
    return api.CustomJobSpec(reading.fields)
