"""Runs of the launcher of training programs, without data, torch or a real model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.trainer.preloaded import preloaded
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.external.checkpoints.states import newest_result
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_lines, read_record, write_record

PROGRAM = Path(__file__).with_name("external_program.py")


@dataclass
class ExternalRun:
    """A run's folder, and the launcher on it."""

    root: Path
    job: JobConfig

    @property
    def uri(self) -> str:
        return self.job.run.run_uri

    def command(self) -> list[str]:
        return [sys.executable, "-m", "vlmpipe.trainer.external.launch", "--config", f"{self.uri}/run.json"]

    def popen(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        command, env = [*self.command(), *arguments], {**os.environ, **variables}
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def launch(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Exit code and everything printed, of a launcher that is forked from the preloaded process."""
        module, *own = self.command()[2:]
        with tempfile.NamedTemporaryFile("r", encoding="utf-8") as output:
            process = {"environment": {**os.environ, **variables}, "output": output.name}
            (code,) = preloaded().run(module, [*own, *arguments], [process], timeout_s=120)
            return code, output.read()

    def record(self, name: str) -> dict[str, Any]:
        return read_record(open_storage(self.uri), name)

    def steps(self) -> list[int]:
        return [line["step"] for line in read_lines(open_storage(self.uri), "metrics.jsonl")]

    def result(self) -> dict[str, bytes]:
        """The files of the newest result that verifies; empty for none."""
        store, found, _ = newest_result(self.job)
        if found is None:
            return {}
        folder = f"checkpoints/{found.name}"
        names = {info.name.removeprefix(f"{folder}/"): info.name for info in store.list(folder)}
        return {short: store.read(name) for short, name in names.items() if short not in ("COMMIT", "node-0.json")}


def wait_for_step(run: ExternalRun, step: int, process: subprocess.Popen[str]) -> None:
    """Until the program has logged this step."""
    while process.poll() is None:
        if Path(run.uri, "metrics.jsonl").is_file() and max(run.steps(), default=0) >= step:
            return
        time.sleep(0.05)
    pytest.fail(f"it ended before step {step}: {process.communicate()[0]}")


def lose_machine(launcher: subprocess.Popen[str]) -> None:
    """Kill the launcher and all that it has started, in whatever sessions they are, as a machine goes."""
    launcher.send_signal(signal.SIGSTOP)  # it must not judge what becomes of them
    while started := [one for one in psutil.Process(launcher.pid).children(recursive=True) if one.status() != "zombie"]:
        for one in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    launcher.kill()
    launcher.communicate()


def external_run(
    root: Path, mode: str = "plain", *, steps: int = 12, run_id: str = "run", **trainer: Any
) -> ExternalRun:
    """A run of the program in tests/support/trainer/external_program.py."""
    base = root / "base-model"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    settings = {
        "name": "counter",
        "command": ["python", str(PROGRAM), mode, "{max_steps}"],
        "resume_args": ["{resume}"],
        "launch": "each-node",
        "data_format": "none",
        **trainer,
    }
    job = JobConfig.model_validate(
        {
            "version": 1,
            "name": "external",
            "run": RunPaths(run_id=run_id, root_uri=str(root)).model_dump(),
            "model": {"family": "hf", "pretrained": {"weights": str(base)}, "tokenizer": str(base)},
            "data": {"source": "builtin:digits", "sequence_length": 256},
            "features": {},
            "train": {
                "trainer": settings,
                "max_steps": steps,
                "global_batch_size": 4,
                "optimizer": {"learning_rate": 1e-3},
            },
            "evaluate": {},
        }
    )
    store = open_storage(job.run.run_uri)
    write_record(store, "run.json", job.model_dump(mode="json"))
    pointers = {"prepared_uri": f"{root}/prepared/0123", "features_uri": "", "features": "off"}
    write_record(store, "prepared.json", pointers)
    return ExternalRun(root, job)
