"""Manifests of images that are no manifests: a row says so, and no doctor ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.doctor.google_api import Answer
from vlmpipe.doctor.images import image_rows
from vlmpipe.doctor.rows import Row

IMAGE = f"us-central1-docker.pkg.dev/my-project/vlmpipe/trainer@sha256:{'1' * 64}"
AMD64 = {"platform": {"os": "linux", "architecture": "amd64"}}
WITHOUT_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "an error": {"errors": [{"code": "UNKNOWN"}]},
    "manifests that are text": {"manifests": "amd64"},
    "manifests of numbers": {"manifests": [1, None]},
    "forms without a platform": {"manifests": [{}, {"platform": "amd64"}, {"platform": ["amd64"]}]},
    "a platform without an architecture": {"manifests": [{"platform": {"os": "linux"}}]},
    "an architecture that is a list": {"manifests": [{"platform": {"os": "linux", "architecture": ["amd64"]}}]},
    "another system": {"manifests": [{"platform": {"os": "windows", "architecture": "amd64"}}]},
    "settings that are text": {"config": "sha256:1"},
    "settings without a digest": {"config": {}},
    "a digest that is a number": {"config": {"digest": 5}},
}


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_run_file(ROOT / "configs/digits.yaml", [f"cluster.image_uri={IMAGE}", "gcp.pipeline_image="])


def row_of(config: RunConfig, manifest: dict[str, Any], settings: dict[str, Any]) -> Row:
    def ask(_: str, __: str, path: str, **___: object) -> Answer:
        return Answer(200, settings if "/blobs/" in path else manifest, "", "")

    api: Any = SimpleNamespace(ask=ask, member="user:me@example.com")
    (row,) = image_rows(config, api)
    return row


@pytest.mark.parametrize("name", WITHOUT_ARCHITECTURE)
def test_a_manifest_without_an_architecture_is_not_seen(config: RunConfig, name: str) -> None:
    row = row_of(config, WITHOUT_ARCHITECTURE[name], {"architecture": "arm64"})
    assert row.state == "cannot see" and "names no architecture" in row.text


@pytest.mark.parametrize("settings", [{}, {"architecture": None}, {"architecture": ["amd64"]}, {"architecture": {}}])
def test_settings_without_an_architecture_are_not_seen(config: RunConfig, settings: dict[str, Any]) -> None:
    assert row_of(config, {"config": {"digest": "sha256:1"}}, settings).state == "cannot see"


def test_a_damaged_form_hides_no_other(config: RunConfig) -> None:
    assert row_of(config, {"manifests": [{}, 1, {"platform": {"os": "linux"}}, AMD64]}, {}).state == "ok"
