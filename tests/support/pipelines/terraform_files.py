"""What our Terraform files say, read from their text: roles, variables, outputs. Whether they hold, Terraform says.

See `tests.support.pipelines.terraform_provider`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import hcl2

KEY = re.compile(r"(?:^|(?<=[{,]))\s*([\w-]+) = ")


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

    def keys_of(self, local: str) -> set[str]:
        """Keys of all objects in a local value, nested ones too."""
        return set(KEY.findall(self.locals[local]))

    @cached_property
    def fixed_roles(self) -> dict[str, str]:
        """Roles that a resource names itself, by its address."""
        roles = {address: body.get("role", "") for address, body in self.resources.items()}
        return {address: role.strip('"') for address, role in roles.items() if role.startswith('"')}

    def problems(self) -> Iterator[str]:
        """What Terraform would let pass: variables that nothing reads, and ones without description or validation."""
        for name, body in {**self.variables, **self.outputs}.items():
            if len(body.get("description", "")) < 20:
                yield f"{name} has no description"
        elsewhere = "\n".join(text for name, text in self.texts.items() if name != "variables.tf")
        for name, body in self.variables.items():
            if not re.search(rf"\bvar\.{name}\b", elsewhere):
                yield f"var.{name} is not used"
            if "type" not in body or ("validation" not in body and _expression(body["type"]) != "bool"):
                yield f"var.{name} has no type or no validation"


@cache
def _parsed(text: str) -> dict[str, Any]:
    parsed: dict[str, Any] = hcl2.loads(text)
    return parsed


def _own(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if not name.startswith("__")}


def _expression(value: Any) -> str:
    """A parsed value as an expression on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_expression(inner)}" for name, inner in _own(value).items()) + "}"
    text = str(value)
    return text[2:-1] if text.startswith("${") and text.endswith("}") else text
