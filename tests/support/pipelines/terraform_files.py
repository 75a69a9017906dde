"""What is wrong with a folder of Terraform files, as far as their text shows: no terraform, no provider, no network.

`terraform validate` says more, and needs the provider from its registry. Which arguments a resource takes was read from
the provider's source: tests/fixtures/terraform.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import hcl2

ABOUT_RESOURCES = {"for_each", "count", "depends_on", "lifecycle"}  # terraform's own, in every resource
REFERENCE = re.compile(r"(?<![\w.])(var|local|data\.\w+|google_\w+)\.(\w+)(?:\[[^\]]*\])?(?:\.(\w+))?")
KEYED = re.compile(r'(google_service_account|google_storage_bucket)\.all\["([\w-]+)"\]')
KEY = re.compile(r"(?:^|(?<=[{,]))\s*([\w-]+) = ")


class Grant(NamedTuple):
    """A role of one of our accounts. `on` is a bucket or an account; empty for the whole project."""

    account: str
    role: str
    on: str
    why: str


class Module:
    """The files of one folder, parsed. Raises lark.UnexpectedInput for one that is no HCL."""

    def __init__(self, folder: Path) -> None:
        self.texts = {path.name: path.read_text() for path in sorted(folder.glob("*.tf"))}
        self._files = [_parsed(text) for text in self.texts.values()]

    def _blocks(self, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Labels, joined by dots, and body of every block of that kind."""
        for file in self._files:
            for block in file.get(kind, []):
                labels = []
                while "__is_block__" not in block:
                    ((label, block),) = block.items()
                    labels.append(label.strip('"'))
                yield ".".join(labels), block

    @cached_property
    def resources(self) -> dict[str, dict[str, Any]]:
        """Bodies by address, such as google_storage_bucket.all or data.google_project.this."""
        found = dict(self._blocks("resource"))
        return found | {f"data.{address}": body for address, body in self._blocks("data")}

    @cached_property
    def variables(self) -> dict[str, dict[str, Any]]:
        return dict(self._blocks("variable"))

    @cached_property
    def outputs(self) -> dict[str, dict[str, Any]]:
        return dict(self._blocks("output"))

    @cached_property
    def locals(self) -> dict[str, str]:
        """Values by name, as expressions on one line."""
        return {name: _expression(value) for _, body in self._blocks("locals") for name, value in _own(body).items()}

    @cached_property
    def provider_version(self) -> str:
        ((_, body),) = self._blocks("terraform")
        return str(body["required_providers"][0]["google"]["version"].strip('"'))

    @cached_property
    def _code(self) -> str:
        """Everything that is evaluated: no comments, no text between quotes but what is interpolated there."""
        return "\n".join(_code_of(text) for file in self._files for text in _texts(file))

    def keys_of(self, local: str) -> set[str]:
        """Keys of all objects in a local value, nested ones too."""
        return set(KEY.findall(self.locals[local]))

    @cached_property
    def grants(self) -> dict[str, Grant]:
        """The roles of our accounts, by name, from the locals that end in _grants."""
        entry = re.compile(r"([\w-]+) = \{(account = [^{}]*)\}")
        found = {}
        for name, value in self.locals.items():
            for key, body in entry.findall(value) if name.endswith("_grants") else ():
                fields = dict(re.findall(r'(\w+) = "([^"]*)"', body))
                on = fields.get("bucket") or fields.get("as") or ""
                found[key] = Grant(fields["account"], fields["role"], on, fields.get("why", ""))
        return found

    @cached_property
    def fixed_roles(self) -> dict[str, str]:
        """Roles that a resource names itself, by its address."""
        roles = {address: body.get("role", "") for address, body in self.resources.items()}
        return {address: role.strip('"') for address, role in roles.items() if role.startswith('"')}

    def problems(self, schema: Mapping[str, Any]) -> list[str]:
        return [*self._references(), *self._variables(), *self._arguments(schema), *self._attributes(schema)]

    def _references(self) -> Iterator[str]:
        for kind, name, attribute in REFERENCE.findall(self._code):
            if kind == "var":
                known = name in self.variables
            elif kind == "local":
                known = name in self.locals and (not attribute or attribute in self.keys_of(name))
            else:
                known = f"{kind}.{name}" in self.resources
            if not known:
                yield f"{kind}.{name}{attribute and '.' + attribute} is not there"
        for text in self.texts.values():
            for resource, key in KEYED.findall(text):
                if key not in self.keys_of("accounts" if resource == "google_service_account" else "buckets"):
                    yield f'{resource}.all["{key}"] is not there'
        for grant in self.grants.values():
            if grant.account not in self.keys_of("accounts"):
                yield f"a grant is for the account {grant.account}, which is not there"
            if grant.on and grant.on not in self.keys_of("accounts") | self.keys_of("buckets"):
                yield f"a grant is on {grant.on}, which is not there"

    def _variables(self) -> Iterator[str]:
        used = {name for kind, name, _ in REFERENCE.findall(self._code_outside_variables) if kind == "var"}
        for name in self.variables:
            if name not in used:
                yield f"var.{name} is not used"
        for name, body in {**self.variables, **self.outputs}.items():
            if len(body.get("description", "")) < 20:
                yield f"{name} has no description"
        for name, body in self.variables.items():
            if "type" not in body or ("validation" not in body and _expression(body["type"]) != "bool"):
                yield f"var.{name} has no type or no validation"

    @cached_property
    def _code_outside_variables(self) -> str:
        files = ({key: value for key, value in file.items() if key != "variable"} for file in self._files)
        return "\n".join(_code_of(text) for file in files for text in _texts(file))

    def _arguments(self, schema: Mapping[str, Any]) -> Iterator[str]:
        for address, body in self.resources.items():
            kind, resource = ("data", address[5:]) if address.startswith("data.") else ("resource", address)
            known = schema[kind].get(resource.split(".")[0])
            if known is None:
                yield f"{address}: no such resource was read from the provider"
            else:
                yield from _wrong_arguments(address, _own(body), known, ABOUT_RESOURCES)

    def _attributes(self, schema: Mapping[str, Any]) -> Iterator[str]:
        for kind, name, attribute in REFERENCE.findall(self._code):
            known = schema["resource"].get(kind) or schema["data"].get(kind.removeprefix("data."))
            if known and attribute and attribute not in known["arguments"]:
                yield f"{kind}.{name} has no attribute {attribute}"


@cache
def _parsed(text: str) -> dict[str, Any]:
    parsed: dict[str, Any] = hcl2.loads(text)
    return parsed


def read_schema(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _wrong_arguments(where: str, body: dict[str, Any], known: Mapping[str, Any], besides: set[str]) -> Iterator[str]:
    arguments, blocks = known["arguments"], known["blocks"]
    inner = [(name, block) for name in body if name in blocks for block in body[name]]
    for dynamic in body.get("dynamic", []):
        ((name, block),) = ((name.strip('"'), block) for name, block in dynamic.items())
        inner.append((name, block["content"][0]))
    for name in body.keys() - besides - {"dynamic"}:
        if name not in blocks and arguments.get(name, "computed") == "computed":
            yield f"{where}: no argument {name}"
    given = body.keys() | {name for name, _ in inner}
    required = {name for name, kind in arguments.items() if kind == "required"}
    required |= {name for name, block in blocks.items() if block.get("required")}
    for name in sorted(required - given):
        yield f"{where}: {name} is missing"
    for name, block in inner:
        if name in blocks:
            yield from _wrong_arguments(f"{where}.{name}", _own(block), blocks[name], set())
        else:
            yield f"{where}: no block {name}"


def _own(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if not name.startswith("__")}


def _expression(value: Any) -> str:
    """A parsed value as an expression on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_expression(inner)}" for name, inner in _own(value).items()) + "}"
    text = str(value)
    return text[2:-1] if text.startswith("${") and text.endswith("}") else text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name != "__comments__":
                yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _code_of(text: str) -> str:
    """`text` without what stands between quotes, but for `${...}` there. Quotes may be nested in these."""
    code, open_ = [], []  # what encloses this place: '"' for a string, '{' for braces
    place = 0
    while place < len(text):
        here = text[place]
        in_string = bool(open_) and open_[-1] == '"'
        if in_string and here == "\\":
            place += 1
        elif here == '"':
            if in_string:
                open_.pop()
            else:
                open_.append('"')
        elif in_string and text.startswith("${", place):
            open_.append("{")
            code.append(" ")
            place += 1
        elif not in_string:
            if here == "{":
                open_.append("{")
            elif here == "}" and open_:
                open_.pop()
            code.append(here)
        place += 1
    return "".join(code)
