"""The forms of what was read have the API's fields and types."""

from __future__ import annotations

from typing import get_type_hints

import pytest

from vlmpipe.job_spec import read_forms
from vlmpipe.job_spec.schema import load_fields

MESSAGES: dict[str, type] = {
    "CustomJobSpec": read_forms.ReadSpec,
    "WorkerPoolSpec": read_forms.ReadPool,
    "ContainerSpec": read_forms.ReadContainer,
    "PythonPackageSpec": read_forms.ReadPackage,
    "EnvVar": read_forms.ReadVariable,
    "MachineSpec": read_forms.ReadMachine,
    "ReservationAffinity": read_forms.ReadReservation,
    "DiskSpec": read_forms.ReadDisk,
    "PscInterfaceConfig": read_forms.ReadAttachment,
    "DnsPeeringConfig": read_forms.ReadPeering,
}
OF_CONTAINERS = {"command"}  # among the words of any task
TYPES = {"text": str, "int32": int, "int64": int, "[text]": list[str]}


@pytest.mark.parametrize("message", MESSAGES)
def test_fields_are_those_of_the_api(message: str) -> None:
    fields, hints = load_fields()["messages"][message], get_type_hints(MESSAGES[message])
    assert hints.keys() - OF_CONTAINERS <= fields.keys()
    assert {name: hint for name, hint in hints.items() if TYPES.get(fields.get(name, ""), hint) != hint} == {}


def test_mounts_have_the_fields_of_both_kinds() -> None:
    messages = load_fields()["messages"]
    expected = messages["NfsMount"].keys() | messages["LustreMount"].keys()
    assert get_type_hints(read_forms.ReadMount).keys() == expected
