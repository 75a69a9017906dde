"""The tutorial, typed in as it stands: its Python blocks make the data and use the model, its commands do the rest.

Nothing is cut short, so the scores that it tells its reader to expect are measured here.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import FENCE
from tests.support.paths import ROOT
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record

TUTORIAL = ROOT / "docs" / "tutorial.md"
INSTALLATION = ("make install", "source .venv/bin/activate")  # what this test runs in
SAID = (
    "expect three of four or more validation questions to be answered correctly. With another sample's image, or with "
    "none, expect about one of four"
)
ABOUT = 0.1


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(3600)
def test_the_tutorial_goes_from_llava_json_to_a_model_that_transformers_loads(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    programs, commands = 0, []
    for language, body in FENCE.findall(TUTORIAL.read_text()):
        if language == "python":
            programs += 1
            _run([sys.executable, "-c", body], tmp_path)
        elif language == "bash":
            lines = [line for line in body.splitlines() if line and line not in INSTALLATION]
            commands += lines
            for line in lines:
                _run(_as_module(line), tmp_path)
    assert programs == 2
    assert "vlmpipe run configs/llava-local.yaml" in commands
    (run,) = tmp_path.glob("runs/runs/llava-local-*")
    assert SAID in " ".join(TUTORIAL.read_text().split())
    result = read_record(open_storage(str(run)), "evaluate.json")
    assert result["exact_match"] > 3 / 4 - ABOUT
    controls = {control: scores["exact_match"] for control, scores in result["controls"].items()}
    assert controls == {name: pytest.approx(1 / 4, abs=ABOUT) for name in ("shuffled_image", "no_image")}
    assert read_record(open_storage(str(run)), "decision.json")["accepted"]
    assert (run / "report.html").is_file()
    assert (run / "export" / "model.safetensors").is_file()


def _as_module(line: str) -> list[str]:
    program, verb, *arguments = shlex.split(line)
    assert program == "vlmpipe"
    return [sys.executable, "-m", "vlmpipe.cli.app", verb, *arguments]


def _run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = answer.stdout[-2000:] + answer.stderr[-2000:]
    assert answer.returncode == 0, f"{shlex.join(command)[:200]} exited with {answer.returncode}:\n{said}"
