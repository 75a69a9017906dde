"""Whether a Kubeflow Pipelines is new enough: kfp's own client against the stand-in."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import pytest

from tests.fakes.kubeflow_pipelines import FakePipelines
from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_for_vertex
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.platforms.kubeflow.runs.client import KubeflowApi
from vlmpipe.platforms.kubeflow.runs.version import require_version, service_version
from vlmpipe.trainer.errors import ConfigError

DIGITS = ROOT / "configs/digits.yaml"
PLAIN, LOOP = b"root: {}\n", b"parameterIterator: {}\n"


@pytest.mark.parametrize(
    ("version", "content", "said"),
    [
        ("2.17.0", LOOP, ""),
        ("2.18.1", LOOP, ""),
        ("2.17.0-rc.1", LOOP, ""),
        ("3.0.0-rc.1", LOOP, ""),
        ("2.14.0", PLAIN, ""),
        ("2.16.1", PLAIN, ""),
        ("master", PLAIN, ""),
        ("v2.5.0-rhoai", PLAIN, ""),
        ("master", LOOP, "calls its version 'master': the loop of a sweep or of data.tasks"),
        ("v2.5.0-rhoai", LOOP, "needs Kubeflow Pipelines 2.17 or newer"),
        ("", LOOP, "does not tell its version"),
    ],
)
def test_what_is_new_enough_or_not_known_is_no_error(tmp_path: Path, version: str, content: bytes, said: str) -> None:
    package = tmp_path / "pipeline.yaml"
    package.write_bytes(content)
    with FakePipelines() as pipelines:
        pipelines.version = version
        note = require_version(KubeflowApi(pipelines.endpoint), package)
    assert bool(note) == bool(said) and said in note


@pytest.mark.parametrize(
    ("version", "content", "said"),
    [
        ("2.13.0", PLAIN, "expected: 2.14 or newer, for the compiled file"),
        ("1.8.22", PLAIN, "2.14 or newer"),
        ("2.16.1", LOOP, "expected: 2.17 or newer, for the loop of a sweep or of data.tasks inside its exit handler"),
    ],
)
def test_what_is_too_old_is_refused(tmp_path: Path, version: str, content: bytes, said: str) -> None:
    package = tmp_path / "pipeline.yaml"
    package.write_bytes(content)
    with FakePipelines() as pipelines:
        pipelines.version = version
        with pytest.raises(ConfigError) as caught:
            require_version(KubeflowApi(pipelines.endpoint), package)
    assert said in caught.value.text() and f"Kubeflow Pipelines {version}" in caught.value.found


def test_the_version_is_read_where_kfps_client_drops_it() -> None:
    with FakePipelines() as pipelines:
        api = KubeflowApi(pipelines.endpoint)
        assert service_version(api) == "2.17.0"
        assert not hasattr(api.client.get_kfp_healthz(), "tag_name"), "kfp's client has it now: take it from there"


@pytest.mark.parametrize("settings", [["data.tasks=3"], []], ids=["loop", "no loop"])
def test_a_loop_is_found_in_the_compiled_file(tmp_path: Path, settings: list[str]) -> None:
    package = compile_pipeline(load_for_vertex(DIGITS, settings), "kubeflow", tmp_path / "p.yaml").path
    with FakePipelines() as pipelines:
        pipelines.version = "2.16.0"
        if settings:
            with pytest.raises(ConfigError, match="upgrade Kubeflow Pipelines, or run without a sweep"):
                require_version(KubeflowApi(pipelines.endpoint), package)
        else:
            assert require_version(KubeflowApi(pipelines.endpoint), package) == ""


def test_the_stand_in_answers_healthz_as_the_api_server() -> None:
    with FakePipelines(multi_user=True) as pipelines:
        connection = http.client.HTTPConnection(pipelines.endpoint.removeprefix("http://"), timeout=10)
        connection.request("GET", "/apis/v2beta1/healthz")
        answer = json.loads(connection.getresponse().read())
        connection.close()
    assert answer.keys() == {"commit_sha", "tag_name", "multi_user"}
