"""Fields of a run file that lead beyond the limits of a server of tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.rules.confinement import service_confinement_problems
from vlmpipe.config.run_config import load_new_run
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.trainer.confinement import LIMITS_VARIABLE
from vlmpipe.trainer.confinement.limits import Limits

DIGITS = ROOT / "configs/digits.yaml"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "way-out").symlink_to("/etc")
    listed = Limits(root=str(tmp_path.resolve()), ledger="", addresses=("gs://mine",))
    monkeypatch.setenv(LIMITS_VARIABLE, listed.to_json())
    return tmp_path


@pytest.mark.usefixtures("root")
def test_a_run_here_may_have_the_shipped_file_and_listed_addresses() -> None:
    load_new_run(DIGITS, ["output.root_uri=gs://mine/runs", "data.source=photos.csv", "data.image_folder=photos",
                           "cluster.env.NCCL_DEBUG=INFO"])  # fmt: skip


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data.source", "/etc/passwd"),
        ("data.source", "../data.csv"),
        ("data.image_folder", "way-out"),
        ("data.image_folder", "gs://others/images"),
        ("data.chat_template", "~/template.jinja"),
        ("output.root_uri", "/tmp/elsewhere"),
        ("register.registry", "gs://others/registry"),
        ("plan.prices_file", "/etc/hostname"),
        ("train.mlflow.tracking_uri", "https://example.com"),
        ("train.wandb.project", "mine"),
        ("data.fetch", "true"),
        ("cluster.env.LD_PRELOAD", "x.so"),
        ("cluster.env.PYTHONPATH", "photos"),
        ("cluster.env.NCCL_NET_PLUGIN", "mine"),
        ("cluster.env.NCCL_TOPO_FILE", "/etc/passwd"),
        ("data.source", "mine.py:records"),
        ("data.source", "os.path:join"),
    ],
)
def test_a_field_that_leads_out_sends_or_runs_code_is_named(field: str, value: str) -> None:
    override = f"{field}={value}"
    with pytest.raises(RunFileError) as caught:
        load_new_run(DIGITS, [override])
    assert field in {problem.field for problem in caught.value.problems}


def test_without_a_server_the_same_fields_are_free() -> None:
    load_new_run(DIGITS, ["data.source=/etc/passwd.csv", "data.image_folder=/tmp"])


@pytest.mark.usefixtures("root")
def test_a_service_is_told_of_listed_addresses_only() -> None:
    found = service_confinement_problems(load_new_run(DIGITS, ["gcp.pipeline_root=gs://others/x"]), "kubeflow.")
    assert [problem.field for problem in found] == ["gcp.pipeline_root"]
    assert not [*service_confinement_problems(load_new_run(DIGITS, ["gcp.pipeline_root=gs://mine/x"]), "kubeflow.")]
