"""Files that are generated from data and from the API client: reference pages, the fields of a CustomJob and grants.

    python -m tests.support.generated_files

writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml
from google.cloud.aiplatform_v1.types import custom_job as api
from google.cloud.aiplatform_v1.types import hyperparameter_tuning_job, study
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tests.support.access_pages import PAGE as ACCESS_PAGE
from tests.support.access_pages import access_page, guides
from tests.support.guide_page import PAGE as GUIDE_PAGE
from tests.support.guide_page import guide_page
from tests.support.paths import ROOT
from tests.support.prices_page import PAGE as PRICES_PAGE
from tests.support.prices_page import prices_page
from tests.support.resume_page import PAGE as RESUME_PAGE
from tests.support.resume_page import resume_page
from tests.support.unproved_page import PAGE as UNPROVED_PAGE
from tests.support.unproved_page import unproved_page
from vlmpipe.access.grants import FILE as GRANTS_FILE
from vlmpipe.access.grants import grants_json
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.catalog.nccl import NET_VARIABLE, Misfit, Network, Source, load_misfits, load_networks
from vlmpipe.job_spec.rules import RULES
from vlmpipe.job_spec.schema import FIELDS_FILE

NCCL_PAGE = ROOT / "docs/reference/nccl.md"
RULES_PAGE = ROOT / "docs/reference/job-spec-rules.md"
KEYS_PAGE = ROOT / "docs/reference/custom-job-fields.md"
KEYS_FILE = ROOT / "tests/support/vertex/run_file_keys.yaml"

NCCL_HEADER = """# NCCL between nodes

The network plugin and transport that NCCL uses between the nodes of a job, by machine type, and the environment
variables that suit it.

- No variable is set automatically. Most machines need none; on the others the variables belong to a version of a
  plugin that is not in the trainer image.
- Variables in `cluster.env` are passed on unchanged.
- A plan of several GPU nodes says which plugin to expect. With `NCCL_DEBUG: INFO` in `cluster.env`, NCCL logs the
  network that it uses (`Using network ...`).
- Between the GPUs of one machine NCCL uses NVLink or PCIe, whatever the network.

None of this has been observed on a GPU machine of Google Cloud.

This page is generated from `vlmpipe/catalog/nccl.yaml` and `machines.yaml`:
`python -m tests.support.generated_files`. A test compares it with them.

## Transport by machine

| machines | plugin | transport | sources |
|---|---|---|---|
"""
REASONS = """
No variable is set on any of them:

| plugin | why | not confirmed |
|---|---|---|
"""
MISFITS = """
## Variables, and where they suit

`vlmpipe check` warns about these variables on machines that they do not suit ([rules](job-spec-rules.md)). Guides set
many of them.

| variables | of | no warning on | why a warning elsewhere | rule | sources |
|---|---|---|---|---|---|
"""
FOOTER = """
- `NCCL_IB_DISABLE=1` causes no warning: it disables a network that is not there.
- A3 Edge is not in the list, because Vertex AI's documentation does not offer it.

## Sources

| | document | date |
|--:|---|---|
"""
RULES_HEADER = """# Job spec rules

The rules that `vlmpipe check` applies to the CustomJob specs of a run file, and to any CustomJob spec
(`vlmpipe check --job-spec FILE`).

| severity | meaning |
|---|---|
| error | Vertex AI refuses the job, or does something other than the spec says; the command ends with exit code 64 |
| warning | the job works, with a drawback |

This page is generated: `python -m tests.support.generated_files`. A test compares it with the code.

| code | severity | what is found | source |
|---|---|---|---|
"""
KEYS_HEADER = """# Fields of a CustomJob

Every field of Vertex AI's CustomJob, with the key of the [run file](run-file.md) that sets it, where vlmpipe takes its
value from, or why it is not offered. `vlmpipe submit --job-spec FILE` sends a job spec of your own with any field.

`cluster.features_machine` and `cluster.evaluate_machine` set the machines of the other two jobs.

This page is generated: `python -m tests.support.generated_files`. A test walks the API client's own messages, sets each
key and looks for its value in the field.
"""
_SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: "int32",
    FieldDescriptor.CPPTYPE_INT64: "int64",
    FieldDescriptor.CPPTYPE_STRING: "text",
    FieldDescriptor.CPPTYPE_BOOL: "bool",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
}


def job_spec_rules_page() -> str:
    """docs/reference/job-spec-rules.md."""
    rows = [f"| {rule.code} | {rule.severity} | {rule.title} | {rule.source} |" for rule in RULES.values()]
    return RULES_HEADER + "\n".join(rows) + "\n"


def run_file_keys() -> dict[str, dict[str, dict[str, Any]]]:
    """Message -> field -> how its value comes about, see the file."""
    found: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(KEYS_FILE.read_text(encoding="utf-8"))
    return found


def keys_page() -> str:
    """docs/reference/custom-job-fields.md."""
    parts = [KEYS_HEADER]
    for message, fields in run_file_keys().items():
        parts.append(f"\n## {message}\n\n| field | run file |\n|---|---|\n")
        for name, how in fields.items():
            text = f"`{how['key']}`" if "key" in how else how.get("from") or f"not offered: {how['not_offered']}"
            parts.append(f"| `{name}` | {text} |\n")
    return "".join(parts)


def nccl_page() -> str:
    """docs/reference/nccl.md."""
    return "".join([NCCL_HEADER, *_networks(), REASONS, *_reasons(), MISFITS, *_misfits(), FOOTER, *_sources()])


def _networks() -> Iterator[str]:
    for name, network in load_networks().items():
        yield f"| {_families(name)} | {network.plugin} | {network.carries} | {_numbers(network)} |\n"


def _reasons() -> Iterator[str]:
    for network in load_networks().values():
        yield f"| {network.plugin} | {network.why} | {network.unconfirmed or '–'} |\n"


def _misfits() -> Iterator[str]:
    for misfit in load_misfits():
        names = [f"`{name}`" for name in misfit.names] + [f"`{NET_VARIABLE}={value}`" for value in misfit.net]
        suits = ", ".join(map(_families, misfit.suits)) or "none"
        yield f"| {', '.join(names)} | {misfit.of} | {suits} | {misfit.why} | {misfit.rule} | {_numbers(misfit)} |\n"


def _sources() -> Iterator[str]:
    for number, source in enumerate(_all_sources(), 1):
        yield f"| {number} | [{source.title}]({source.url}) | {source.date} |\n"


def _numbers(entry: Network | Misfit) -> str:
    """The entry's sources by their numbers in the list of sources."""
    numbers = {source: number for number, source in enumerate(_all_sources(), 1)}
    return ", ".join(f"[{numbers[source]}](#sources)" for source in entry.sources)


def _all_sources() -> list[Source]:
    """Every source once, in the order of its first use."""
    entries: list[Network | Misfit] = [*load_networks().values(), *load_misfits()]
    return list(dict.fromkeys(source for entry in entries for source in entry.sources))


def _families(network: str) -> str:
    """Machine types with this network, those of a family that all have it as one."""
    catalog = load_catalog().machines.values()
    found = []
    for machine in catalog:
        if machine.network == network:
            family = machine.machine_type.rpartition("-")[0]
            whole = {other.network for other in catalog if other.machine_type.startswith(f"{family}-")} == {network}
            name = f"{family}-*" if whole else machine.machine_type
            found.append(f"{name} (not confirmed)" if "network" in machine.unconfirmed else name)
    return ", ".join(dict.fromkeys(found))


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


def tuning_fields() -> dict[str, Any]:
    """Messages and enums of a HyperparameterTuningJob; its other fields than the study and the counts are "any"."""
    messages: dict[str, dict[str, str]] = {}
    enums: dict[str, list[str]] = {}
    job = hyperparameter_tuning_job.HyperparameterTuningJob
    descriptor = job.pb(job()).DESCRIPTOR
    messages[descriptor.name] = {
        field.name: _SCALARS.get(field.cpp_type, "any") if field.name.endswith("_count") else "any"
        for field in descriptor.fields
        if field.name != "trial_job_spec"
    } | {"study_spec": "StudySpec"}
    _describe(study.StudySpec.pb(study.StudySpec()).DESCRIPTOR, messages, enums)
    for name in ("IntegerValueSpec", "IntValueCondition"):  # other whole numbers of the API are not below 0
        messages[name] = {field: kind.replace("int64", "number") for field, kind in messages[name].items()}
    return {"messages": messages, "enums": enums}


def _describe(descriptor: Descriptor, messages: dict[str, dict[str, str]], enums: dict[str, list[str]]) -> None:
    fields = messages.setdefault(descriptor.name, {})
    for field in descriptor.fields:
        inner = field.message_type
        if inner is not None and inner.full_name == "google.protobuf.Duration":
            kind = "duration"
        elif inner is not None and inner.full_name.startswith("google.protobuf."):
            kind = "any"
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


def fields_json() -> str:
    """`custom_job_fields.json`."""
    return json.dumps({**api_fields(), "tuning": tuning_fields()}, indent=1) + "\n"


if __name__ == "__main__":
    pages = ((NCCL_PAGE, nccl_page()), (RULES_PAGE, job_spec_rules_page()), (KEYS_PAGE, keys_page()))
    made = {ACCESS_PAGE: access_page(), UNPROVED_PAGE: unproved_page(), ROOT / GRANTS_FILE: grants_json(), **guides()}
    made[PRICES_PAGE] = prices_page()
    made[RESUME_PAGE] = resume_page(RESUME_PAGE.read_text(encoding="utf-8"))
    made[GUIDE_PAGE] = guide_page(GUIDE_PAGE.read_text(encoding="utf-8"))
    for file, text in (*pages, (FIELDS_FILE, fields_json()), *made.items()):
        file.write_text(text, encoding="utf-8")
