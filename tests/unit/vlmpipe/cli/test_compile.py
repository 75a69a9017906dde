"""`vlmpipe compile`: files written, settings without effect, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.command_line import Vlmpipe
from tests.support.paths import ROOT
from tests.support.pipelines.example_project import for_vertex

DIGITS = "configs/digits.yaml"
IMAGES = ("cluster.image_uri", "gcp.pipeline_image")
MISSING = "gcp.project, gcp.service_account, gcp.pipeline_image, cluster.image_uri, gcp.pipeline_root"


def test_compile_reports_settings_without_effect_on_kubeflow(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("compile", "configs/llava-7b-lora.yaml", "--target", "kubeflow", "--output", str(tmp_path))
    assert answer.code == 0 and (tmp_path / "llava-7b-lora.kubeflow.yaml").exists()
    assert "  cluster.scheduling_strategy: spot: has no effect on Kubeflow" in answer.out


def test_compile_names_what_keeps_a_run_from_starting(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    fields = (f"data.source={tmp_path / 'photos'}", "--output", str(tmp_path))
    said = vlmpipe("compile", DIGITS, *for_vertex(), *fields).out
    assert "jobs, valid, but no run of it can start:" in said and "checked" not in said
    for field in ("data.source", "gcp.project", "cluster.image_uri", "gcp.pipeline_image"):
        assert f"  {field}: found " in said
    own = ["gcp.project=my-project", *(f"{field}=us-docker.pkg.dev/p/r/i@sha256:{64 * 'a'}" for field in IMAGES)]
    answer = vlmpipe("compile", DIGITS, *for_vertex(own), "--output", str(tmp_path))
    assert answer.out.rstrip().endswith("jobs, checked")
    local = vlmpipe("compile", DIGITS, "--target", "local", *fields)
    assert local.out.rstrip().endswith("jobs, checked")


def test_compiling_needs_no_planner_and_no_numpy(tmp_path: Path) -> None:
    program = (
        "import sys, atexit; loaded = {'numpy', 'torch', 'vlmpipe.planner.plan', 'google.cloud.aiplatform'}\n"
        "atexit.register(lambda: print(sorted(loaded & set(sys.modules))))\n"
        f"sys.argv = ['vlmpipe', 'compile', 'configs/llava-7b.yaml', '--output', {str(tmp_path)!r}]\n"
        "from vlmpipe.cli import app; app.app()"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"


def test_compile_writes_one_file_for_each_run_file_where_it_can_run(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("compile", DIGITS, "configs/llava-13b-fsdp.yaml", "train.epochs=2", "--output", str(tmp_path))
    assert answer.code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"digits.local.yaml", "llava-13b-fsdp.vertex.yaml"}
    assert f"for this machine alone; for --target vertex it also needs {MISSING}" in " ".join(answer.out.split())


def test_a_project_from_env_sh_leaves_a_laptops_file_for_this_machine(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("compile", DIGITS, "gcp.project=my-project", "--output", str(tmp_path))
    assert answer.code == 0 and [path.name for path in tmp_path.iterdir()] == ["digits.local.yaml"]
    assert "also needs gcp.service_account" in answer.out


def test_compile_writes_nothing_when_one_run_file_is_incomplete(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    files = (DIGITS, "configs/openmoji.yaml", "--target", "vertex")
    answer = vlmpipe("compile", *files, *for_vertex(["gcp.project="]), "--output", str(tmp_path))
    assert answer.code == 64
    assert "gcp.project: missing" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_laptops_file_for_vertex_ai_is_refused_with_all_that_it_lacks(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("compile", DIGITS, "--target", "vertex", "--output", str(tmp_path))
    assert answer.code == 64 and list(tmp_path.iterdir()) == []
    assert all(f"  {field}: missing, expected " in answer.err for field in MISSING.split(", "))
    assert "to do:    copy the missing fields from vlmpipe docs first-run-on-vertex" in answer.err


def test_publish_names_missing_fields_before_it_asks_for_a_login(vlmpipe: Vlmpipe) -> None:
    answer = vlmpipe("publish", DIGITS, "--registry", "https://us-central1-kfp.pkg.dev/my-project/pipelines")
    assert answer.code == 64 and "gcp.pipeline_image: missing" in answer.err


def test_compile_refuses_two_run_files_of_one_name(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    assert "same name" in vlmpipe("compile", DIGITS, DIGITS, "--output", str(tmp_path)).err
