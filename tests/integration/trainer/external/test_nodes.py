"""A training program on two nodes: what each is told, and checkpoints of which a node keeps a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.external_runs import external_run
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.platforms.local.jobs.job import run_job
from vlmpipe.trainer.errors import ExitCode, UserError

PROGRAM = """
import json, os, sys, time
from pathlib import Path
node, run = os.environ["RANK"], Path(sys.argv[1])
assert "CLUSTER_SPEC" in os.environ and os.environ["WORLD_SIZE"] == "2" and "LOCAL_RANK" not in os.environ
print(f"node {node} attempt {os.environ['VLMPIPE_ATTEMPT']} resumes {bool(os.environ['VLMPIPE_RESUME'])}", flush=True)
checkpoint = Path(os.environ["VLMPIPE_CHECKPOINTS"], "checkpoint-5")
checkpoint.mkdir()
(checkpoint / f"rng_state_{node}.pth").write_text("random")
(checkpoint / "model.safetensors").write_text("the same on both")
if node == "1":
    (checkpoint / "global_step5").mkdir()
    (checkpoint / "global_step5/optimizer-1.pt").write_text("a part")
    time.sleep(600)
else:
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 5, "max_steps": 9}))
    while not list(run.rglob("trainer/parts/*/node-1.json")):  # until the other launcher has seen it
        time.sleep(0.05)
    sys.exit(75)
"""


def test_a_checkpoint_of_which_a_node_keeps_a_part_is_not_resumed(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    run = external_run(tmp_path, command=["python", str(script), str(tmp_path)], launch="each-node")
    task = {"image_uri": "image", "command": ["python"], "args": run.command()[1:]}
    machine = {"machine_type": "n1-standard-4"}
    pool: dict[str, Any] = {"machine_spec": machine, "container_spec": task, "replica_count": 1}
    spec = {"worker_pool_specs": [pool] * 2, "base_output_directory": {"output_uri_prefix": run.uri}}
    with pytest.raises(UserError) as stopped:
        run_job("train", spec, labels={STEP_LABEL: "train"})
    assert stopped.value.code == ExitCode.PREEMPTED
    logs = {path.stem: path.read_text() for path in Path(run.uri, "logs/train").glob("workerpool*.log")}
    assert "node 0 attempt" in logs["workerpool0-0"] and "checkpoint of step 5 committed" in logs["workerpool0-0"]
    assert "node 1 attempt" in logs["workerpool1-0"]
    assert "files of checkpoints on the disk of node 1 are not copied" in logs["workerpool1-0"]
    (noted,) = Path(run.uri, "trainer/parts").rglob("node-1.json")
    assert "rng_state" not in noted.read_text()

    code, text = run.launch()
    assert code == ExitCode.CONFIG, text
    assert "lacks global_step5/optimizer-1.pt, which node-1 kept on its own disk" in text
    assert "have the program gather its checkpoints" in text
