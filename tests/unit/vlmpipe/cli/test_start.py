"""`vlmpipe run`: what it says at the end, and its exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.command_line import Vlmpipe
from tests.support.data.prepared import llava_folder, record, write_json
from tests.support.pipelines.example_project import for_vertex
from vlmpipe.platforms.local import process as local_process
from vlmpipe.trainer.preflight import devices

DIGITS = "configs/digits.yaml"


def test_a_run_on_kubeflow_needs_its_address(vlmpipe: Vlmpipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KF_PIPELINES_ENDPOINT", raising=False)
    answer = vlmpipe("submit", DIGITS, *for_vertex(), "train.epochs=2", "--target", "kubeflow")
    assert (answer.code, answer.out) == (64, "")
    assert "KF_PIPELINES_ENDPOINT" in answer.err


@pytest.mark.usefixtures("fake_pipeline")
def test_run_ends_with_results_and_what_to_type_next(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("run", DIGITS, f"output.root_uri={tmp_path}", "--run-id", "mine", "--plain")
    assert answer.code == 0
    folder = tmp_path / "runs" / "mine"
    said = " ".join(answer.out.split())
    for line in (
        "Starting run mine",
        "validation accuracy, 88 questions 94.0 %",
        "majority baseline: always the most frequent answer 21.0 %",
        "same model without an image 20.0 %",
        "CIDEr-D of captions, from 0 to 10 0.80",
        "digit 90.0 % (majority baseline 10.0 %)",
        "gate Accepted: above chance",
        "registered digits version 3, champion",
        f"report {folder}/report.html",
    ):
        assert line in said
    assert f"vlmpipe status {folder} this summary again" in said


@pytest.mark.usefixtures("fake_pipeline")
@pytest.mark.parametrize(
    ("files", "said"),
    [
        (0, ["This machine has no GPU, so jobs run on its CPU; cluster names 2 x NVIDIA_L4 (g2-standard-24), which a"]),
        (1, ["This machine has 1 GPU; cluster names 2 x NVIDIA_L4 (g2-standard-24), which a"]),
        (2, []),
    ],
)
def test_a_local_run_says_once_which_gpus_are_not_here(
    vlmpipe: Vlmpipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, said: list[str]
) -> None:
    monkeypatch.setattr(devices.glob, "glob", lambda _: [f"/dev/nvidia{number}" for number in range(files)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = {"machine_type": "g2-standard-24", "accelerator_type": "NVIDIA_L4", "accelerator_count": "2"}
    machine = [f"cluster.{name}={value}" for name, value in names.items()]
    answer = vlmpipe("run", DIGITS, f"output.root_uri={tmp_path}", "--plain", *machine)
    assert answer.code == 0
    assert [line.partition(" run on Vertex")[0] for line in answer.out.splitlines() if "L4" in line] == said
    assert "GPU" not in vlmpipe("run", DIGITS, f"output.root_uri={tmp_path}", "--plain").out


@pytest.mark.usefixtures("fake_pipeline")
def test_a_run_on_data_of_ones_own_does_not_offer_that(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    source = write_json(llava_folder(tmp_path, 20)[0].parent / "a.json", [record(n) for n in range(20)])
    offer = "vlmpipe run configs/llava-local.yaml"
    own = (f"data.source={source}", f"data.image_folder={tmp_path / 'images'}")
    for overrides, offered in (((), True), (own, False)):
        answer = vlmpipe("run", DIGITS, f"output.root_uri={tmp_path / 'runs'}", "--plain", *overrides)
        assert answer.code == 0 and (offer in answer.out) == offered, answer.out


@pytest.fixture
def rejecting_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = """import sys, pathlib; pathlib.Path(sys.argv[1], "decision.json").write_text(
        '{"accepted": false, "reason": "Rejected: below chance", '
        '"checks": [{"name": "c", "metric": "exact_match - chance", "passed": false, "why": "below chance"}]}')"""
    monkeypatch.setattr(
        local_process, "pipeline_command", lambda run, **_: [sys.executable, "-c", decision, str(run.folder)]
    )


@pytest.mark.usefixtures("rejecting_pipeline")
def test_a_rejected_model_is_one_json_document_with_its_exit_code(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    run = ("run", DIGITS, f"output.root_uri={tmp_path}", "--run-id", "mine", "--json")
    watch = ("status", "mine", "--root", str(tmp_path), "--watch", "--json")
    for command in (run, watch):
        answer = vlmpipe(*command, "--fail-on-reject")
        assert (answer.code, answer.json["exit_code"]) == (76, 76)
        assert "the gate rejected the model" in answer.err
    assert vlmpipe(*watch).json["exit_code"] == 0


@pytest.mark.usefixtures("rejecting_pipeline")
def test_a_rejected_model_ends_with_76_where_that_is_asked_for(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    command = ("run", DIGITS, f"output.root_uri={tmp_path}", "--run-id", "mine", "--plain")
    answer = vlmpipe(*command, "--fail-on-reject")
    assert (answer.code, "the gate rejected the model. Rejected: below chance" in answer.err) == (76, True)
    watch = ("status", "mine", "--root", str(tmp_path), "--watch", "--plain")
    assert [vlmpipe(*watch, *option).code for option in ((), ("--fail-on-reject",))] == [0, 76]
    assert vlmpipe("status", "mine", "--root", str(tmp_path), "--fail-on-reject").code == 64
    again = vlmpipe(*command)
    assert again.code == 64
    assert f"vlmpipe status {tmp_path / 'runs/mine'}" in again.err


@pytest.mark.usefixtures("rejecting_pipeline")
def test_a_rejected_run_shows_the_command_to_train_for_longer(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("run", DIGITS, f"output.root_uri={tmp_path}", "train.epochs=7", "--plain")
    assert f"vlmpipe run {DIGITS} output.root_uri={tmp_path} train.epochs=14 --run-id digits-" in answer.out


@pytest.mark.usefixtures("fake_pipeline")
def test_run_with_json_prints_one_object(vlmpipe: Vlmpipe, tmp_path: Path) -> None:
    answer = vlmpipe("run", DIGITS, f"output.root_uri={tmp_path}", "--run-id", "mine", "--json")
    assert answer.code == 0
    assert (answer.json["outcome"], answer.json["evaluation"]["exact_match"]) == ("done", 0.94)
