"""A training program on two nodes: what each is told, and a checkpoint of which each node keeps a part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.external_runs import ExternalRun, external_run
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.platforms.local.jobs.job import run_job
from vlmpipe.trainer.errors import ExitCode, UserError

PROGRAM = """
import json, os, sys, zipfile
from pathlib import Path
node = os.environ["RANK"]
assert "CLUSTER_SPEC" in os.environ and os.environ["WORLD_SIZE"] == "2" and "LOCAL_RANK" not in os.environ
resume = Path(os.environ["VLMPIPE_RESUME"]) if os.environ["VLMPIPE_RESUME"] else None
found = sorted(path.relative_to(resume).as_posix() for path in resume.rglob("*.pt")) if resume else []
print(f"node {node} attempt {os.environ['VLMPIPE_ATTEMPT']} resumes {json.dumps(found)}", flush=True)
checkpoints = Path(os.environ["VLMPIPE_CHECKPOINTS"])
tag = checkpoints / "global_step5"
tag.mkdir()
for name in [f"zero_pp_rank_{node}_mp_rank_00_optim_states.pt", *["mp_rank_00_model_states.pt"][int(node):]]:
    with zipfile.ZipFile(tag / name, "w") as file:
        file.writestr("data", node)
if node == "0":
    (checkpoints / "latest").write_text("global_step5")
sys.exit(75)
"""
SHARDS = [f"global_step5/zero_pp_rank_{node}_mp_rank_00_optim_states.pt" for node in range(2)]


def train(run: ExternalRun) -> dict[str, str]:
    """The logs of the two nodes after a start, which the program ends with 75."""
    task = {"image_uri": "image", "command": ["python"], "args": run.command()[1:]}
    machine = {"machine_type": "n1-standard-4"}
    pool: dict[str, Any] = {"machine_spec": machine, "container_spec": task, "replica_count": 1}
    spec = {"worker_pool_specs": [pool] * 2, "base_output_directory": {"output_uri_prefix": run.uri}}
    with pytest.raises(UserError) as stopped:
        run_job("train", spec, labels={STEP_LABEL: "train"})
    logs = {path.stem: path.read_text() for path in Path(run.uri, "logs/train").glob("workerpool*.log")}
    assert stopped.value.code == ExitCode.PREEMPTED, logs
    return logs


def two_nodes(root: Path) -> ExternalRun:
    script = root / "program.py"
    script.write_text(PROGRAM)
    return external_run(root, command=["python", str(script)], launch="each-node")


def test_each_nodes_part_of_a_checkpoint_is_committed(tmp_path: Path) -> None:
    run = two_nodes(tmp_path)
    logs = train(run)
    assert all(f"node {node} attempt 1 resumes []" in logs[f"workerpool{node}-0"] for node in range(2))
    assert "checkpoint of step 5 committed" in logs["workerpool0-0"], logs
    assert "1 files of global_step5 on node 1 copied" in logs["workerpool1-0"]

    code, text = run.launch()
    assert code == ExitCode.CONFIG, text
    assert "DeepSpeed's shards of 2 processes, and this start has 1" in text


@pytest.mark.slow
def test_every_node_resumes_with_the_parts_of_all(tmp_path: Path) -> None:
    run = two_nodes(tmp_path)
    train(run)
    logs = train(run)
    expected = json.dumps(["global_step5/mp_rank_00_model_states.pt", *SHARDS])
    assert all(f"node {node} attempt 2 resumes {expected}" in logs[f"workerpool{node}-0"] for node in range(2)), logs
