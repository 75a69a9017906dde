"""A token that user code prints and raises is looked for in everything that a run wrote and showed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.replicas import pool, run_failing, spec
from tests.support.analysed_models import keep_analyses
from tests.support.paths import ROOT
from tests.support.short_form import chosen
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.redaction import HIDDEN

TOKEN = "hf_" + "aB3dE5fG7hI9jK1lM3nO5pQ7rS9tU1vW3x"

# Loaded by every step of the run; data preparation then prints the token, to both streams, and fails with it.
PLANTED = """
import os

def prepare(job, progress):
    token = os.environ["PLANTED"]
    progress.update(1, 2, message="with " + token)
    print("printing", token, flush=True)
    os.write(2, ("written past Python: " + token + "\\n").encode())
    raise {error}

if "VLMPIPE_FAILURE_FILE" in os.environ:
    import vlmpipe.trainer.data.prepare.pipeline
    vlmpipe.trainer.data.prepare.pipeline.prepare = prepare
"""
RAISED = {
    "unexpected": 'RuntimeError("refused: " + token)',
    "for people": '__import__("vlmpipe.trainer.errors", fromlist=["errors"]).DataError("refused: " + token)',
}
RAISED_TRIED = chosen(RAISED, lambda name: name == "unexpected")

pytestmark = pytest.mark.timeout(120)


def files_with(folder: Path, text: str) -> list[str]:
    assert sum(path.is_file() for path in folder.rglob("*")) > 5, "a run has been there"
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.parametrize("error", RAISED_TRIED.values(), ids=RAISED_TRIED)
def test_a_steps_token_is_in_no_file_and_no_output_of_a_run(tmp_path: Path, error: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(PLANTED.format(error=error))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "PLANTED": TOKEN}

    def vlmpipe(*arguments: str) -> str:
        command = [sys.executable, "-m", "vlmpipe.cli.app", *arguments]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout

    arguments = (str(ROOT / "configs/digits.yaml"), f"output.root_uri={tmp_path / 'out'}")
    keep_analyses(load_run_file(arguments[0], arguments[1:]))
    said = vlmpipe("run", *arguments, "--run-id", "r1")
    run = tmp_path / "out/runs/r1"
    record = json.loads((run / "steps/prepare-data.json").read_text())
    assert (record["state"], HIDDEN in record["detail"]["error"]) == ("failed", True), said
    log = (run / "pipeline.log").read_text()
    assert f"printing {HIDDEN}" in log and f"past Python: {HIDDEN}" in log and f"refused: {HIDDEN}" in log
    told = [said, *(vlmpipe(command, str(run)) for command in ("logs", "diagnose", "status"))]
    assert [TOKEN in one for one in told] == [False] * 4
    assert files_with(tmp_path / "out", TOKEN) == []


def test_a_token_of_a_replica_is_in_no_log_and_no_record(
    tmp_path: Path, alive: int, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f'print("printing {TOKEN}", flush=True); print("error: refused {TOKEN}", file=sys.stderr); sys.exit(65)'
    error = run_failing(spec(tmp_path, pool(tmp_path, script)))
    shown = "".join(capsys.readouterr())
    log = (tmp_path / "run/logs/train/workerpool0-0.log").read_text()
    assert f"printing {HIDDEN}" in log and f"printing {HIDDEN}" in shown and f"refused {HIDDEN}" in str(error)
    assert TOKEN not in log + shown + str(error) + (tmp_path / "run/steps/train.json").read_text()


def test_text_without_a_known_form_is_kept_byte_by_byte(tmp_path: Path, alive: int) -> None:
    script = 'os.write(1, b"caf\\xe9 \\xff\\r\\nno end"); sys.exit(65)'
    run_failing(spec(tmp_path, pool(tmp_path, script)))
    assert (tmp_path / "run/logs/train/workerpool0-0.log").read_bytes() == b"caf\xe9 \xff\r\nno end"
