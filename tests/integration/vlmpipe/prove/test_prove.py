"""`vlmpipe prove` on real starts: faults that are put into a trainer are found, and ours keeps the laws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.support.paths import ROOT
from vlmpipe.cli.app import app
from vlmpipe.prove.prove import DEFAULT_RUN_FILE
from vlmpipe.trainer.errors import ExitCode, UserError

TOY = ROOT / "tests" / "support" / "drivers" / "toy_trainer.py"
COMMAND = [
    "python", str(TOY), "--data", "{data}", "--model", "{model}", "--output", "{output}", "--checkpoints",
    "{checkpoints}", "--steps", "{max_steps}", "--micro", "{micro_batch_size}", "--total", "{global_batch_size}",
    "--save-every", "{checkpoint_every_steps}",
]  # fmt: skip


def prove(folder: Path, faults: list[str], *laws: str) -> dict[str, Any]:
    """The verdict on each of the laws for the toy trainer with these faults."""
    content = yaml.safe_load(DEFAULT_RUN_FILE.read_text())
    content["train"]["trainer"] = {
        "name": "toy",
        "command": [*COMMAND, "--faults", *faults],
        "resume_args": ["--resume", "{resume}"],
        "launch": "self",  # one process stands for all: it computes what they would
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    arguments = [word for law in laws for word in ("--law", law)]
    output = folder / "proven"
    result = CliRunner().invoke(app, ["prove", str(path), "--json", "--output", str(output), *arguments])
    proven = json.loads((output / "prove.json").read_text())
    broken = [one for one in proven["laws"] if one["state"] != "holds"]
    assert isinstance(result.exception, UserError) == bool(broken)
    if broken:
        assert isinstance(result.exception, UserError) and result.exception.code == ExitCode.REJECTED
    assert "Laws of toy" in (output / "prove.html").read_text()
    return {one["law"]: one for one in proven["laws"]}


def test_a_trainer_that_is_done_when_stopped_is_found(tmp_path: Path) -> None:
    found = prove(tmp_path, ["done"], "stopped")["stopped"]
    assert found["state"] == "does not hold"
    assert "exit code 0; the launcher counts steps, and says 75" in found["found"]


@pytest.mark.slow
def test_a_sound_trainer_keeps_the_laws(tmp_path: Path) -> None:
    found = prove(tmp_path, [], "processes", "accumulation", "resume", "stopped")
    assert {name: one["state"] for name, one in found.items()} == dict.fromkeys(found, "holds")


@pytest.mark.slow
def test_a_faulty_trainer_breaks_the_laws_that_it_should(tmp_path: Path) -> None:
    found = prove(tmp_path, ["means", "forget", "done"], "processes", "accumulation", "resume", "stopped")
    assert {name: one["state"] for name, one in found.items()} == dict.fromkeys(found, "does not hold")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [["model.family=qwen3_vl"], ["train.strategy=fsdp"], ["train.strategy=zero2"]])
def test_our_trainer_keeps_all_laws(tmp_path: Path, settings: list[str]) -> None:
    arguments = ["prove", str(DEFAULT_RUN_FILE), *settings, "--output", str(tmp_path / "proven"), "--limit", "600"]
    result = CliRunner().invoke(app, arguments)
    laws = json.loads((tmp_path / "proven" / "prove.json").read_text())["laws"]
    assert {one["law"]: one["state"] for one in laws} == {one["law"]: "holds" for one in laws}, result.output
