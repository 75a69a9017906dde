from __future__ import annotations

import pytest
import yaml

from vlmpipe.importing.importer import import_job_spec
from vlmpipe.importing.sources import Kind, Source

IMAGE = "us-central1-docker.pkg.dev/p/r/t@sha256:" + "0" * 64


def corrected(command: list[str], nodes: int = 1) -> tuple[list[str], str]:
    machine = {"machine_type": "a2-highgpu-8g", "accelerator_type": "NVIDIA_TESLA_A100", "accelerator_count": 8}
    task = {"image_uri": IMAGE, "command": command}
    pools = [{"machine_spec": machine, "replica_count": 1, "container_spec": task}]
    if nodes > 1:
        pools.append({**pools[0], "replica_count": nodes - 1})
    text = import_job_spec(Source("job.yaml", Kind.JOB_SPEC, {"worker_pool_specs": pools})).text
    return yaml.safe_load(text)["worker_pool_specs"][0]["container_spec"]["command"], text


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["torchrun", "--nproc_per_node=4", "t.py"], ["torchrun", "--nproc_per_node=8", "t.py"]),
        (["torchrun", "--nproc-per-node", "4", "t.py"], ["torchrun", "--nproc-per-node", "8", "t.py"]),
        (["torchrun", "t.py", "4"], ["torchrun", "--nproc_per_node=8", "t.py", "4"]),
        (["python", "-m", "torch.distributed.run", "t.py"],
         ["python", "-m", "torch.distributed.run", "--nproc_per_node=8", "t.py"]),
        (["bash", "-c", "cd /app && torchrun --nproc_per_node 4 t.py"],
         ["bash", "-c", "cd /app && torchrun --nproc_per_node 8 t.py"]),
        (["bash", "-c", "torchrun t.py --out x"], ["bash", "-c", "torchrun --nproc_per_node=8 t.py --out x"]),
        (["deepspeed", "--num_gpus", "4", "t.py"], ["deepspeed", "--num_gpus", "8", "t.py"]),
        (["accelerate", "launch", "--num_processes=4", "t.py"], ["accelerate", "launch", "--num_processes=8", "t.py"]),
    ],
)  # fmt: skip
def test_a_number_is_that_of_the_pools(command: list[str], expected: list[str]) -> None:
    words, text = corrected(command)
    assert words == expected
    assert "# VP216: found" in text


def test_nodes_are_those_of_the_pools() -> None:
    words, text = corrected(["torchrun", "--nnodes=4", "--nproc_per_node=8", "--node_rank=0", "t.py"], nodes=2)
    assert words[1] == "--nnodes=2"
    assert "VP217: found --nnodes 4" in text.replace("\n      # ", " ")


@pytest.mark.parametrize("command", [["python", "t.py"], ["torchrun", "--nproc_per_node=$N", "t.py"]])
def test_what_is_not_known_stays(command: list[str]) -> None:
    assert corrected(command)[0] == command
