"""The effective run file of a run, as later commands read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainer.gone_fields import with_gone
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.config.job import JobConfig, without_gone
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train.of_tomorrow": 1}, "train.of_tomorrow"),
        ({"data.max_samples": "all"}, "data.max_samples"),
        ({"train.zero_quantized_weights": True}, "train.zero_quantized_weights"),
        ({"train.zero_hpz": True}, "train.zero_hpz"),
        ({"train.gradient_compression": "powersgd"}, "train.gradient_compression"),
    ],
)
def test_a_run_of_another_version_is_named(change: dict[str, object], named: str, tmp_path: Path) -> None:
    content = merged(TINY, {"run": {"run_id": "r1", "root_uri": str(tmp_path)}})
    write_record(LocalStorage(tmp_path), "run.json", content)
    assert JobConfig.load(f"{tmp_path}/run.json").run.run_id == "r1"
    write_record(LocalStorage(tmp_path), "run.json", merged(content, change))
    with pytest.raises(ConfigError, match=f"run.json is not of this version of vlmpipe, by {named}") as refused:
        JobConfig.load(f"{tmp_path}/run.json")
    assert "use the vlmpipe that made the run" in refused.value.fix


def test_a_run_from_before_fields_were_left_out_is_read_where_they_did_nothing(tmp_path: Path) -> None:
    """Every record of a run holds every field, with its default too."""
    content = merged(TINY, {"run": {"run_id": "r1", "root_uri": str(tmp_path)}})
    before = with_gone(content)
    assert without_gone(before) == content | {"plan": {}, "checkpoint": {}, "cluster": {}}
    assert JobConfig.of_record(before, "run.json") == JobConfig.of_record(content, "run.json")


@pytest.mark.parametrize(("was", "now"), [(True, "on"), (False, "off")])
def test_a_run_from_before_sharing_had_three_values_is_read(was: bool, now: str, tmp_path: Path) -> None:
    content = merged(TINY, {"run": {"run_id": "r1", "root_uri": str(tmp_path)}, "data.share_prefix": was})
    assert JobConfig.of_record(content, "run.json").data.share_prefix == now
    assert JobConfig.of_record(merged(content, {"data.share_prefix": now}), "run.json").data.share_prefix == now
    with pytest.raises(ConfigError, match=r"data\.share_prefix"):
        JobConfig.of_record(merged(content, {"data.share_prefix": 1}), "run.json")
