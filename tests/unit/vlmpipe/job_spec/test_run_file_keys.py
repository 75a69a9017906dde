"""Every field of the API's CustomJob is set by a key of the run file, or there is a reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.generated_files import KEYS_PAGE, api_fields, keys_page, run_file_keys
from tests.support.paths import ROOT
from vlmpipe.config.overrides import apply_overrides, parse_overrides
from vlmpipe.config.run_config import load_run_file, parse_run_config
from vlmpipe.job_spec.build import job_order

MESSAGES = api_fields()["messages"]
KEYS = run_file_keys()
ALONE = "{replica_count: 1, restart_job_on_worker_restart: false, image_uri: ''}"  # as by default
BASE = ["gcp.project=my-project", f"cluster={ALONE}"]
SETTABLE = [(message, name, how) for message, fields in KEYS.items() for name, how in fields.items() if "key" in how]


def job_of(overrides: list[str]) -> dict[str, Any]:
    """The CustomJob of the training step, as a tree of the API's messages."""
    base = load_run_file(ROOT / "configs/digits.yaml", BASE).to_dict()
    config = parse_run_config(apply_overrides(base, parse_overrides(overrides)), "digits")
    order = job_order(config, "train", "gs://b/r")
    around = {"display_name": order.display_name, "labels": order.labels}
    return {**around, "encryption_spec": order.encryption_spec_key_name, "job_spec": order.spec()}


def values_of(value: Any, kind: str, message: str, name: str) -> Iterator[Any]:
    """What a tree holds in a field of all messages of one kind."""
    kind = kind.strip("[]")
    for one in value if isinstance(value, list) else [value]:
        if kind in MESSAGES and isinstance(one, dict):
            if kind == message and name in one:
                yield one[name]
            for field, inner in one.items():
                yield from values_of(inner, MESSAGES[kind][field], message, name)


def test_every_field_of_every_message_has_a_key_or_a_reason() -> None:
    assert {message: set(fields) for message, fields in KEYS.items()} == {
        message: set(fields) for message, fields in MESSAGES.items()
    }
    assert all(
        len({"key", "from", "not_offered"} & set(how)) == 1 for fields in KEYS.values() for how in fields.values()
    )


@pytest.mark.parametrize(("message", "name", "how"), SETTABLE, ids=[f"{one[0]}.{one[1]}" for one in SETTABLE])
def test_the_key_reaches_the_field(message: str, name: str, how: dict[str, Any]) -> None:
    needed = list(how.get("with", ()))
    without, having = ([*needed, *given] for given in ([], [f"{how['key']}={how['value']}"]))
    if needed and "accelerator" in name:  # one is refused without the other
        without = []
    before, after = (list(values_of(job_of(one), "CustomJob", message, name)) for one in (without, having))
    assert after and after != before


def test_the_page_is_what_the_data_says() -> None:
    assert KEYS_PAGE.read_text(encoding="utf-8") == keys_page(), "run: python -m tests.support.generated_files"
