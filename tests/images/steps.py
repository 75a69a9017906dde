"""Steps of a pipeline, run inside the images as Vertex AI starts them: real data, a real job of two replicas."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.images.builder import ROOT, Builder
from tests.images.hosts import two_hosts
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.errors import ExitCode, UserError

USER = 1000  # of the trainer image
PORT = 2222
POOLS = [f"workerpool{pool}" for pool in range(2)]
STEP_TIMEOUT_S = 300.0


def write_run(folder: Path, strategy: str, changes: dict[str, Any]) -> str:
    """run.json of a run below `folder`, which containers see as /data. Returns its folder there."""
    content = merged(TINY, {"train.strategy": strategy, "train.epochs": 1, "features.cache": "off", **changes})
    run = folder / "runs" / strategy
    run.mkdir(parents=True)
    content["run"] = {"run_id": strategy, "root_uri": "/data"}
    (run / "run.json").write_text(json.dumps(content))
    return f"/data/runs/{strategy}"


def prepare_data(builder: Builder, container: str, folder: Path, run_uri: str) -> None:
    """Run the compiled pipeline's prepare_data step: its own command line, with what the service puts into it."""
    volumes = [f"--volume={folder}:/data", f"--volume={ROOT / 'configs'}:/data/configs:ro"]
    compiled = folder / "pipelines/llava-7b.vertex.yaml"
    if not compiled.exists():
        command = ["vlmpipe", "compile", "/data/configs/llava-7b.yaml", "--output", "/data/pipelines"]
        builder.run(container, command, *volumes)
    pipeline = yaml.safe_load(compiled.read_text())
    step = pipeline["deploymentSpec"]["executors"]["exec-prepare-data"]["container"]
    outputs = pipeline["components"]["comp-prepare-data"]["outputDefinitions"]
    told = {
        "inputs": {"parameterValues": {"run_uri": run_uri}},
        "outputs": {
            "parameters": {name: {"outputFile": f"/data/outputs/{name}"} for name in outputs["parameters"]},
            "artifacts": {
                name: {"artifacts": [{"name": name, "type": kind["artifactType"], "uri": f"/data/outputs/{name}.json"}]}
                for name, kind in outputs["artifacts"].items()
            },
            "outputFile": "/data/outputs/executor_output.json",
        },
    }
    arguments = [text.replace("{{$}}", json.dumps(told)) for text in step["args"]]
    builder.run(container, [*step["command"], *arguments], *volumes)
    output = json.loads((folder / "outputs/executor_output.json").read_text())
    if output["parameterValues"]["features"] != "off" or not output["artifacts"]["metrics"]:
        raise UserError(f"prepare_data said {output}", code=ExitCode.UNEXPECTED)


def train(builder: Builder, folder: Path, run_uri: str) -> tuple[int, list[str]]:
    """Train on two hosts, each a container of the trainer image. Returns steps done, and what was compiled in them."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)  # where runs really lie, the bucket's roles say who writes
    with two_hosts() as hosts:
        known = [f"--add-host={name}:{address}" for name, address in hosts.items()]
        first, second = hosts
        with builder.container("trainer", *known) as chief, builder.container("trainer", *known) as worker:
            started = [
                _replica(builder, folder, host, container, pool, run_uri, list(hosts))
                for pool, host, container in zip(POOLS, (first, second), (chief, worker), strict=True)
            ]
            said = [process.communicate(timeout=STEP_TIMEOUT_S)[0] for process in started]
            codes = [process.returncode for process in started]
            if any(codes):
                texts = "\n  ".join("\n".join(said).splitlines())
                raise UserError(f"the replicas ended with {codes}:\n  {texts}", code=ExitCode.UNEXPECTED)
            root = Path(builder.buildah("mount", chief))
            compiled = [path.name for path in (root / "home/vlmpipe/torch_extensions").iterdir()]
    run = folder / "runs" / Path(run_uri).name
    preflight = json.loads((run / "preflight.json").read_text())
    if preflight["world_size"] != len(hosts):
        raise UserError(f"preflight counted {preflight['world_size']} ranks", code=ExitCode.UNEXPECTED)
    return json.loads((run / "summary.json").read_text())["steps"], compiled


def _replica(
    builder: Builder, folder: Path, host: str, container: str, pool: str, run_uri: str, hosts: list[str]
) -> subprocess.Popen[str]:
    """Start one replica on a host, with what Vertex AI tells it."""
    cluster = {name: [f"{place}:{PORT}"] for name, place in zip(POOLS, hosts, strict=True)}
    spec = {"cluster": cluster, "environment": "cloud", "task": {"type": pool, "index": 0}}
    builder.buildah("config", f"--env=CLUSTER_SPEC={json.dumps(spec)}", f"--hostname={host}", container)
    command = builder.command(
        container,
        [
            "python",
            "-m",
            "vlmpipe.trainer.launch",
            "--nproc-per-node",
            "auto",
            "--",
            "vlmpipe.trainer.train",
            "--config",
            f"{run_uri}/run.json",
        ],
        f"--volume={folder}:/data",
        "--env=OMP_NUM_THREADS=1",
    )
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
