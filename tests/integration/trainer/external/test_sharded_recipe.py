"""recipes/sharded: ZeRO-2 and FSDP2 under torchrun, with the checkpoints that DeepSpeed and torch write themselves."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.support.paths import ROOT
from tests.support.trainer.external_runs import ExternalRun, lose_machine, wait_for_step
from vlmpipe.components.runtime.prepared_data import prepare_run
from vlmpipe.components.runtime.resolve import open_run_folder
from vlmpipe.components.runtime.run_results import sync_model
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.progress import Progress

# Steps, and steps between saves. On a quiet machine ZeRO-2 would end 200 steps before the first COMMIT is seen.
STEPS = {"zero2": (600, 50), "fsdp2": (200, 25)}


def sharded_run(root: Path, recipe: str, run_id: str) -> ExternalRun:
    """A run of the recipe with little data, prepared."""
    steps, saved_every = STEPS[recipe]
    changes = [f"train.max_steps={steps}", f"train.checkpoint_every_steps={saved_every}", "train.global_batch_size=4"]
    config = load_run_file(ROOT / f"recipes/sharded/{recipe}.yaml", [*changes, "data.max_samples=60"])
    run_uri = open_run_folder(json.dumps(config.to_dict()), str(root), run_id=run_id)
    job = JobConfig.load(f"{run_uri}/run.json")
    prepare_run(job, Progress(run_uri, "prepare-data", quiet=True))
    return ExternalRun(root, job)


def start(run: ExternalRun, processes: int = 2) -> subprocess.Popen[str]:
    command = [*run.command(), "--nproc-per-node", str(processes)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_commit(run: ExternalRun, process: subprocess.Popen[str]) -> None:
    while not any(Path(run.uri, "trainer").rglob("COMMIT")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def finish(run: ExternalRun, processes: int = 2, code: int = 0) -> str:
    process = start(run, processes)
    text, _ = process.communicate()
    assert process.returncode == code, text[-3000:]
    return text


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["zero2", "fsdp2"])
def test_killed_stopped_and_resumed_it_ends_with_the_weights_of_an_uninterrupted_run(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO's shards are refused for another number of processes; torch's checkpoints continue with it."""
    monkeypatch.chdir(ROOT)
    straight, run = (sharded_run(tmp_path, recipe, run_id) for run_id in ("straight", "interrupted"))
    finish(straight)
    process = start(run)
    wait_for_commit(run, process)
    lose_machine(process)
    process = start(run)
    wait_for_step(run, max(run.steps()) + 3, process)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate()
    assert process.returncode == ExitCode.PREEMPTED, text[-3000:]
    assert "continuing after step" in text
    committed = sorted(path.parent for path in Path(run.uri, "trainer/checkpoints").rglob("COMMIT"))
    names = {path.relative_to(committed[-1]).as_posix() for path in committed[-1].rglob("*") if path.is_file()}
    if recipe == "zero2":
        assert "latest" in names and sum("zero_pp_rank" in name for name in names) == 2
        assert "DeepSpeed's shards of 2 processes, and this start has 1" in finish(run, 1, ExitCode.CONFIG)
    else:
        assert ".metadata" in names and {name for name in names if name.endswith(".distcp")} == {
            "__0_0.distcp",
            "__1_0.distcp",
        }
        assert "continuing after step" in finish(run, 1)
    finish(run)
    assert run.steps() == list(range(1, STEPS[recipe][0] + 1))
    exports = [Path(one.uri, "export") for one in (straight, run) if sync_model(one.job)]
    expected, found = (load_file(export / "model.safetensors") for export in exports)
    # Under FSDP one process made some of the steps: sums in another order.
    differences = [abs(expected[name] - found[name]).max() for name in expected]
    assert expected.keys() == found.keys() and max(differences) <= (0 if recipe == "zero2" else 2e-4)
