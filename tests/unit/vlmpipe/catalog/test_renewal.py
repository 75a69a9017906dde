"""Renewing prices from a kept file: shown before they are written, whole tables, and nothing else changes."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlmpipe.catalog import renewal
from vlmpipe.catalog.machines import FOLDER, read_yaml
from vlmpipe.catalog.price_schema import PriceFile
from vlmpipe.catalog.prices import FILE_NAME
from vlmpipe.catalog.renewal import main, renewed
from vlmpipe.trainer.errors import ConfigError

SOURCE, DAY = "ce-2026-08-20", date(2026, 12, 1)
TEXT = (FOLDER / FILE_NAME).read_text(encoding="utf-8")


def kept() -> dict[str, Any]:
    """compute.instance of a file with the prices that prices.yaml has from this source."""
    instances: dict[str, Any] = {}
    for table in PriceFile.model_validate(read_yaml(FILE_NAME)).machines:
        if table.source == SOURCE:
            field = {"standard": "hour", "spot": "hour_spot"}[table.term]
            for name, usd in table.usd_per_hour.items():
                regions = instances.setdefault(name, {"cost": {}})["cost"]
                regions.setdefault(table.region, {})[field] = usd
    return instances


def tables(text: str) -> PriceFile:
    return PriceFile.model_validate(yaml.safe_load(text))


def test_equal_prices_get_a_later_day_and_no_other_line_changes() -> None:
    result = renewed(TEXT, kept(), SOURCE, DAY)
    assert (result.changes, result.left) == ((), ()) and result.equal > 100
    added = set(result.text.splitlines()) - set(TEXT.splitlines())
    assert tables(result.text).sources["ce-2026-12-01"].date == DAY
    assert SOURCE in tables(result.text).sources  # disks and storage are still from it
    assert added == {"  ce-2026-12-01:", "  - source: ce-2026-12-01", "    date: 2026-12-01"}


def test_a_changed_price_is_shown_with_its_share_and_the_rest_stays() -> None:
    costs = kept()
    costs["a2-highgpu-1g"]["cost"]["us-central1"]["hour"] *= 1.1
    result = renewed(TEXT, costs, SOURCE, DAY)
    (change,) = result.changes
    assert (change.name, round(change.share, 6)) == ("a2-highgpu-1g in us-central1, standard", 0.1)
    before, after = dict(tables(TEXT).hourly()), dict(tables(result.text).hourly())
    moved = {key for key in before if before[key].usd != after[key].usd}
    assert moved == {("us-central1", "standard", "a2-highgpu-1g")} and before.keys() == after.keys()
    assert "1 prices change" in result.lines()[0] and "(+10.0%)" in result.lines()[1]


def test_a_day_that_a_source_has_already_is_refused() -> None:
    """Its tables would be told as read from that source, under two equal keys."""
    with pytest.raises(ConfigError, match=f"has a source {SOURCE} already"):
        renewed(TEXT, kept(), SOURCE, date.fromisoformat(SOURCE[3:]))


@pytest.mark.parametrize("value", [None, 0, "3.67", True])
def test_a_table_with_a_missing_price_is_left_whole_and_named(value: object) -> None:
    costs = kept()
    costs["a2-highgpu-1g"]["cost"]["us-central1"]["hour"] = value
    result = renewed(TEXT, costs, SOURCE, DAY)
    assert result.left == ("us-central1, standard: no price of a2-highgpu-1g",)
    assert dict(tables(TEXT).hourly())["us-central1", "standard", "a2-highgpu-2g"].date == "2026-08-20"
    assert dict(tables(result.text).hourly())["us-central1", "standard", "a2-highgpu-2g"].date == "2026-08-20"


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="is from 'nowhere'"):
        renewed(TEXT, kept(), "nowhere", DAY)


def test_nothing_is_written_before_it_was_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE_NAME).write_text(TEXT, encoding="utf-8")
    (tmp_path / "pricing.yml").write_text(yaml.safe_dump({"compute": {"instance": kept()}}), encoding="utf-8")
    monkeypatch.setattr(renewal, "FOLDER", tmp_path)
    command = [str(tmp_path / "pricing.yml"), "--source", SOURCE, "--date", str(DAY)]
    main(command)
    assert "Nothing is written" in capsys.readouterr().out
    assert (tmp_path / FILE_NAME).read_text(encoding="utf-8") == TEXT
    main([*command, "--write"])
    assert "ce-2026-12-01" in (tmp_path / FILE_NAME).read_text(encoding="utf-8")
    (tmp_path / "pricing.yml").write_text("about: {}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has no compute\.instance"):
        main(command)
