"""Paths and addresses beyond the limits of a server of tools, and the places that ask for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.trainer.confinement import LIMITS_VARIABLE
from vlmpipe.trainer.confinement.limits import Limits, limits, require_address, require_own_code
from vlmpipe.trainer.data.sources.function import load_function
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage import open_storage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "photos").mkdir(parents=True)
    (root / "way-out").symlink_to(tmp_path)
    (root / "inside").symlink_to(root / "photos")
    return root.resolve()


def of(root: Path, *addresses: str) -> Limits:
    return Limits(root=str(root), ledger=str(root.parent / "ledger"), addresses=addresses)


@pytest.mark.parametrize(
    "text",
    ["photos", "photos/a.png", "inside/a.png", "photos/../photos", "not/there", "@last", "What is 1/2?", "", "."],
)
def test_places_in_the_root_and_other_texts_are_inside(root: Path, text: str) -> None:
    assert of(root).objection(text) == ""
    assert of(root).objection(f"{root}/{text}") == ""


@pytest.mark.parametrize(
    "text",
    ["/etc/passwd", "..", "../x", "photos/../../x", "~", "~/.ssh/id", "way-out", "way-out/x", "file:///etc/passwd",
     "FILE:///etc", "photos/../way-out/x"],
)  # fmt: skip
def test_paths_and_links_that_lead_out_are_outside(root: Path, text: str) -> None:
    assert of(root).objection(text) == f"outside the root {root}"


@pytest.mark.parametrize(
    ("address", "is_listed"),
    [
        ("gs://mine/runs", True), ("gs://mine/runs/a/b", True), ("gs://mine/runs2", False), ("gs://mine", False),
        ("gs://mine/runs/../x", False), ("s3://any/x", True), ("bq://p.d.t", True), ("bq://p.d2.t", False),
        ("https://example.com", False), ("GS://mine/runs", False), ("gs://mine/runs.others", False),
        ("gs://mine/runs:1", False), ("https://hub.example/a", True), ("https://hub.example.evil/a", False),
        ("https://hub.example:8080/a", False), ("bq://p.d:t", False), ("bq://p.d/t", False),
    ],
)  # fmt: skip
def test_an_address_is_listed_by_its_beginning(root: Path, address: str, is_listed: bool) -> None:
    found = of(root, "gs://mine/runs", "s3://", "bq://p.d", "https://hub.example")
    assert found.objection(address) == ("" if is_listed else "an address that this server does not list")


def test_a_root_beside_one_of_the_same_beginning_is_not_it(root: Path) -> None:
    assert of(root).objection(f"{root}-2/file")
    assert of(root).objection(f"{root}.private/file") and of(root).objection(f"{root}:private")
    assert of(root.with_name("root.")).objection(f"{root}.private")


def test_without_limits_nothing_is_asked() -> None:
    assert limits() is None
    require_address("gs://any/thing")
    require_own_code("anything")


def test_buckets_and_functions_are_refused_where_they_are_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "mine.py").write_text("raise SystemExit('this code ran')")
    monkeypatch.setenv(LIMITS_VARIABLE, of(root, "gs://mine").to_json())
    assert limits() == of(root, "gs://mine")
    for address in ("gs://others/data", "s3://others/data"):
        with pytest.raises(UserError, match=f"{address} is an address that this server does not list") as caught:
            open_storage(address)
        assert caught.value.code == ExitCode.NO_PERMISSION
    with pytest.raises(UserError, match="runs code of your own"):
        load_function(f"{root}/mine.py:records")
    assert open_storage(str(root)).root_uri == str(root)


def test_a_variable_that_cannot_be_read_stops_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMITS_VARIABLE, '{"root": "/", "everything": true}')
    with pytest.raises(UserError, match="problems"):
        limits()
