"""Differences between run files."""

from __future__ import annotations

import json
from pathlib import Path

from vlmpipe.config.run_config import load_run_file
from vlmpipe.runs.setting_differences import difference_rows, differences

DIGITS = Path(__file__).parents[4] / "configs/digits.yaml"


def test_differences_name_every_field_with_both_values() -> None:
    before = load_run_file(DIGITS)
    after = load_run_file(DIGITS, ["gate.max_loss=3", "gate.per_slice={a: 0.5}", "cluster.env={LEVEL: high}"])
    found = differences(before.to_dict(), after.to_dict())
    assert set(found) >= {"gate.max_loss", "gate.per_slice.a", "cluster.env.LEVEL"}
    rows = {field: (was, now) for field, was, now in difference_rows(found)}
    assert rows["gate.max_loss"] == ("none", "3.0") and rows["gate.per_slice.a"] == ("none", "0.5")
    assert rows["cluster.env.LEVEL"] == ("none", "a value")
    assert differences(before.to_dict(), json.loads(json.dumps(before.to_dict()))) == {}
