"""Parameter servers and evaluators of a training program, on this machine as on Vertex AI: worker pools 2 and 3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.external_runs import external_run
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.platforms.local.jobs.job import run_job

PROGRAM = """
import json, os, signal, struct, sys
from pathlib import Path
task = json.loads(os.environ["TF_CONFIG"])
role = f"{task['task']['type']}-{task['task']['index']}"
Path(sys.argv[1], f"{role}.json").write_text(json.dumps(task))
if role.startswith("ps"):
    signal.pause()  # as a TensorFlow server, which never ends by itself
if role.startswith("chief"):
    Path(os.environ["VLMPIPE_OUTPUT"], "saved_model.pb").write_bytes(b"graph")
"""


@pytest.mark.slow
def test_every_role_starts_with_its_own_tf_config_and_the_chief_ends_the_job(tmp_path: Path) -> None:
    script, seen = tmp_path / "program.py", tmp_path / "seen"
    script.write_text(PROGRAM)
    seen.mkdir()
    run = external_run(
        tmp_path,
        command=["python", str(script), str(seen)],
        launch="tensorflow",
        roles={"ps": 1, "evaluator": 1},
        result="saved-model",
        evaluate_command=["true"],
    )
    task = {"image_uri": "image", "command": ["python"], "args": run.command()[1:]}
    machine = {"machine_type": "n1-standard-4"}
    pool: dict[str, Any] = {"machine_spec": machine, "container_spec": task, "replica_count": 1}
    spec = {"worker_pool_specs": [pool] * 4, "base_output_directory": {"output_uri_prefix": run.uri}}
    run_job("train", spec, labels={STEP_LABEL: "train"})

    told = {path.stem: json.loads(path.read_text()) for path in seen.glob("*.json")}
    assert told.keys() == {"chief-0", "worker-0", "ps-0", "evaluator-0"}
    clusters = [task["cluster"] for task in told.values()]
    assert all(cluster == clusters[0] for cluster in clusters)
    assert {role: len(hosts) for role, hosts in clusters[0].items()} == {"chief": 1, "worker": 1, "ps": 1}
    assert run.result() == {"saved_model.pb": b"graph"}
