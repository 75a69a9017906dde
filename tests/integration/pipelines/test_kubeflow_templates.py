"""`vlmpipe publish --target kubeflow` with kfp's client against the strict stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.kubeflow_pipelines import FakePipelines
from tests.support.paths import ROOT
from tests.support.pipelines.example_project import for_vertex
from tests.support.vertex.submit_runs import Submit
from vlmpipe import api
from vlmpipe.platforms.kubeflow.runs.client import TOKEN_VARIABLE

pytest_plugins = ("tests.support.vertex.fixtures",)
PUBLISH = ("publish", str(ROOT / "configs/digits.yaml"), *for_vertex(), "--target", "kubeflow")


@pytest.fixture
def pipelines(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePipelines]:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with FakePipelines() as server:
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.endpoint)
        yield server


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return {}


@pytest.fixture(autouse=True)
def compile_once(monkeypatch: pytest.MonkeyPatch, compiled: dict[str, Any]) -> None:
    compile_one = api.compile

    def cached(config: Any, target: Any, path: Path) -> Any:
        key = config.model_dump_json()
        if key not in compiled:
            answer = compile_one(config, target, path)
            compiled[key] = answer, path.read_text(encoding="utf-8")
        answer, content = compiled[key]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        return answer

    monkeypatch.setattr(api, "compile", cached)


def test_each_content_is_a_version_once(pipelines: FakePipelines, vlmpipe: Submit) -> None:
    first = vlmpipe(*PUBLISH, "--json")
    assert first.code == 0, first.err
    (published,) = first.json["published"]
    (pipeline,), (version,) = pipelines.pipelines.values(), pipelines.versions.values()
    assert (pipeline["display_name"], published["uploaded"]) == ("digits", True)
    assert published["version"] == version["display_name"] and published["version"].startswith("content-")
    assert version["pipeline_spec"] == next(yaml.safe_load_all(Path(published["pipeline"]).read_text(encoding="utf-8")))
    address = f"{pipelines.endpoint}/#/pipelines/details/{pipeline['pipeline_id']}/version/"
    assert published["template"] == address + version["pipeline_version_id"]
    again = vlmpipe(*PUBLISH)
    assert again.code == 0 and "digits is there already" in again.out
    for epochs in (2, 3):  # more than a page of the stand-in's
        assert vlmpipe(*PUBLISH, f"train.epochs={epochs}").code == 0
    assert "digits is there already" in vlmpipe(*PUBLISH, "train.epochs=3").out
    assert (len(pipelines.pipelines), len(pipelines.versions)) == (1, 3)


def test_an_upload_that_fails_is_completed_by_the_next(pipelines: FakePipelines, vlmpipe: Submit) -> None:
    pipelines.faults = [0, 0, 0, 503]  # the upload is the fourth request
    failed = vlmpipe(*PUBLISH)
    assert (failed.code, "503" in failed.err, len(pipelines.versions)) == (69, True, 0)
    assert vlmpipe(*PUBLISH).code == 0
    assert (len(pipelines.pipelines), len(pipelines.versions)) == (1, 1)


def test_tags_are_refused_before_anything_is_compiled(pipelines: FakePipelines, vlmpipe: Submit) -> None:
    refused = vlmpipe(*PUBLISH, "--tag", "stable")
    assert (refused.code, "--tag" in refused.err, pipelines.requests) == (64, True, [])
