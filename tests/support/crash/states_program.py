"""Copies of a training program's checkpoints and of its result, in one process: python -m MODULE ROOT POINT...

For the Nth point a forked child, which follows the program as the launcher does, is killed there: with ROOT/N while a
checkpoint is copied, with ROOT/result-N while the result is. Prints how each ended as JSON. Imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.crash.world import stage
from tests.support.trainer.checkpoints import record
from tests.support.trainer.external_runs import external_run
from vlmpipe.trainer.checkpoint.commit import checkpoint_name, upload_node_files
from vlmpipe.trainer.checkpoint.fault_points import VARIABLE
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.external.checkpoints.states import SavedStates, states_of


def job_in(root: Path) -> JobConfig:
    """A run whose checkpoints are kept one at a time."""
    root.mkdir(exist_ok=True)
    job = external_run(root).job
    return job.model_copy(update={"train": job.train.model_copy(update={"keep_checkpoints": 1})})


def written(folder: Path, step: int) -> dict[str, bytes]:
    """What the program writes at a step, its state last; the content by the files' names."""
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    files = {
        "model.safetensors": bytes([step]) * 5000,
        "trainer_state.json": json.dumps({"global_step": step}).encode(),
    }
    for name, data in files.items():
        (made / name).write_bytes(data)
    return files


def follow(root: Path) -> SavedStates:
    """A start of the job that has found what it resumes from."""
    states = SavedStates(job_in(root), record(num_nodes=1, world_size=1), [root / "program"])
    with tempfile.TemporaryDirectory() as folder:
        states.resume(Path(folder))
    return states


def copy_next(root: Path) -> int:
    """Follow the program over one more checkpoint; its step."""
    states = follow(root)
    step = states.newest_step + 1
    written(root / "program", step)
    states.save_last(lambda: False)
    return step


def keep_result(root: Path) -> None:
    states, model = follow(root), root / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights" * 1000)
    states.save_result(model, 9, "hf")


def begun(root: Path) -> None:
    """A run whose first start has copied three checkpoints and was killed in its fourth copy."""
    for _ in range(3):
        copy_next(root)
    store = states_of(job_in(root).run.run_uri)
    upload_node_files(store, checkpoint_name(3, 4, "left"), 0, stage(root / "program", 4, 0))


def killed_at(point: str, work: Callable[[Path], object], root: Path) -> int:
    """How a fork ended that does this and is killed at the point."""
    child = os.fork()
    if not child:
        os.environ[VARIABLE] = point
        try:
            work(root)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    root, found = Path(sys.argv[1]), dict[str, list[int]]()
    for number, point in enumerate(sys.argv[2:]):
        places = (copy_next, root / str(number)), (keep_result, root / f"result-{number}")
        for _, place in places:
            begun(place)
        found[point] = [killed_at(point, work, place) for work, place in places]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
