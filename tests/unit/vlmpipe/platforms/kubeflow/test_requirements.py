"""What a run file needs for Kubeflow: paths that steps reach, secrets, volumes, and settings without effect there."""

from __future__ import annotations

from pathlib import Path

import pytest
from kfp import components

from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_shipped
from vlmpipe.config.run_config import load_run_file
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.platforms.kubeflow.requirements import require_kubeflow
from vlmpipe.platforms.pipeline_yaml import documents
from vlmpipe.platforms.table import platform_of
from vlmpipe.trainer.errors import ConfigError

DIGITS = ROOT / "configs/digits.yaml"


ON_S3 = [
    "output.root_uri=s3://bucket/root",
    "data.source=s3://bucket/data.json",
    "register.registry=s3://bucket/registry",
    "kubeflow.s3_endpoint=http://minio.example.com:9000",
    "kubeflow.secret_env.AWS_ACCESS_KEY_ID=minio/accesskey",
    "kubeflow.secret_env.AWS_SECRET_ACCESS_KEY=minio/secretkey",
]
ON_A_VOLUME = [
    "output.root_uri=/mnt/team/root",
    "data.source=/mnt/team/data.json",
    "register.registry=/mnt/team/registry",
    "kubeflow.volumes=[{claim: team-data, mount_path: /mnt/team}]",
]


def test_every_step_on_kubeflow_gets_its_secrets_and_volumes(tmp_path: Path) -> None:
    config = load_shipped(DIGITS, [*ON_S3, ON_A_VOLUME[-1]])
    platform_of("kubeflow").check_files(config)
    path = compile_pipeline(config, "kubeflow", tmp_path / "p.yaml").path
    spec, platform = documents(path.read_bytes())
    executors = spec["deploymentSpec"]["executors"]
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert set(settings) == set(executors)
    for name, executor in executors.items():
        found = {one["keyToEnv"][0]["envVar"]: one["secretName"] for one in settings[name]["secretAsEnv"]}
        assert found == {"AWS_ACCESS_KEY_ID": "minio", "AWS_SECRET_ACCESS_KEY": "minio"}
        (mount,) = settings[name]["pvcMount"]
        assert (mount["mountPath"], mount["constant"]) == ("/mnt/team", "team-data")
        assert {"name": "AWS_ENDPOINT_URL_S3", "value": "http://minio.example.com:9000"} in executor["container"]["env"]
    assert components.load_component_from_file(str(path)).platform_spec.platforms


def test_more_variables_than_a_train_job_takes_are_refused() -> None:
    given = ", ".join(f"A{number}: s/k" for number in range(101))
    with pytest.raises(ConfigError, match=r"kubeflow\.secret_env.*found 101 variables .*at most 100"):
        require_kubeflow(load_shipped(DIGITS, [*ON_A_VOLUME, f"kubeflow.secret_env={{{given}}}"]))


@pytest.mark.parametrize("name", ["PYTHONPATH", "STORAGE_URI"])
def test_variables_that_kserve_does_not_leave_to_the_container_are_refused(name: str) -> None:
    image = f"us-docker.pkg.dev/p/r/vllm@sha256:{'1' * 64}"
    deploy = f"deploy={{endpoint: digits, image_uri: '{image}', env: {{{name}: /a}}}}"
    with pytest.raises(ConfigError, match=rf"deploy\.env\.{name}"):
        require_kubeflow(load_shipped(DIGITS, [*ON_A_VOLUME, deploy]))


def test_paths_on_a_volume_are_reached_and_others_are_not(tmp_path: Path) -> None:
    config = load_shipped(DIGITS, ON_A_VOLUME)
    platform_of("kubeflow").check_files(config)
    require_kubeflow(config)
    assert (
        platform_of("kubeflow").root_uri(config) == "/mnt/team/root"
        and config.bucket_root_uri == config.gcp.pipeline_root
    )
    section = config.kubeflow
    assert not any(map(section.reaches, ("/mnt/teams/x", "/mnt/team/../x", "runs", "/mnt", "")))
    assert section.claim_uri("/mnt/team/a/b") == "pvc://team-data/a/b"
    assert section.claim_uri("s3://bucket/a") == "s3://bucket/a"
    with pytest.raises(ConfigError, match=r'data\.source: found "/data\.json", expected gs://.* kubeflow\.volumes'):
        platform_of("kubeflow").check_files(load_shipped(DIGITS, [ON_A_VOLUME[0], "data.source=/data.json"]))
    with pytest.raises(ConfigError, match=r"data\.source.*expected a gs:// path"):
        platform_of("vertex").check_files(load_shipped(DIGITS, ON_S3))
    twice = load_shipped(DIGITS, [*ON_S3, "kubeflow.secret_env.AWS_ENDPOINT_URL_S3=minio/endpoint"])
    with pytest.raises(ConfigError, match=r"kubeflow\.secret_env\.AWS_ENDPOINT_URL_S3: is set by another field"):
        require_kubeflow(twice)


def test_settings_without_effect_on_kubeflow_are_reported(tmp_path: Path) -> None:
    config = load_run_file(ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml", ["notify.email=[a@b.org]"])
    found = compile_pipeline(config, "kubeflow", tmp_path / "p.yaml").unused
    assert {one.field for one in found} == {
        "cluster.scheduling_strategy",
        "cluster.reduction_server",
        "cluster.restart_job_on_worker_restart",
        "notify.email",
    }
    assert all("has no effect on Kubeflow: " in one.text for one in found)
    assert compile_pipeline(config, "vertex", tmp_path / "p.yaml").unused == ()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("gcp.pipeline_root=", r'output\.root_uri: found "runs", expected gs://bucket/folder, s3://'),
        ("cluster.image_uri=", r"cluster\.image_uri: missing"),
        ("register.registry=/models", r'register\.registry: found "/models"'),
    ],
)
def test_what_kubeflow_needs_and_the_run_file_lacks_is_named(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        compile_pipeline(load_shipped(DIGITS, [override]), "kubeflow", tmp_path / "p.yaml")
