"""What is kept of four pipelines, so that a change of the graph is seen in review: tests/fixtures/pipelines.

    python -m tests.support.pipelines.golden_pipelines

writes the outlines anew. An outline has the graph, each step's image, machine, retries, display name and constants, the
parameters of the console, the jobs with their worker pools, and what is different on Kubeflow. It has not the steps'
source, which is reviewed where it stands, nor the run file with its defaults, whose reference is
docs/reference/run-file.md.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_shipped
from vlmpipe.config.run_config import RunConfig
from vlmpipe.job_spec.build import job_spec, jobs_of
from vlmpipe.job_spec.parse import parse_job_spec
from vlmpipe.job_spec.worker_pools import STEP_LABEL
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.platforms.kubeflow.jobs.job import placement, without_reducers
from vlmpipe.platforms.kubeflow.jobs.manifest import train_job
from vlmpipe.platforms.pipeline_yaml import documents
from vlmpipe.records.stage_folders import stage_run_id

FOLDER = ROOT / "tests/fixtures/pipelines"
# Those that are shipped, and one on several nodes with a Reduction Server.
RUN_FILES = [
    path
    for folder in ("configs", "configs/sweeps", "tests/fixtures/run_files")
    for path in sorted((ROOT / folder).glob("*.yaml"))
]
# The start model's answers; stages; a Reduction Server, spot machines and a capacity fallback; a sweep.
KEPT_NAMES = ("digits-replay", "llava-7b-stages", "llava-7b-zero2-spot", "scorers")
KEPT = [path for path in RUN_FILES if path.stem in KEPT_NAMES]
RUN_URI = "gs://example-bucket/vlmpipe/runs/RUN"
LEFT_OUT = ("run_file", "compiled")  # the run file in one form or another


def on_vertex(config: RunConfig) -> dict[str, Any]:
    """The pipeline of a run file, compiled for Vertex AI."""
    with tempfile.TemporaryDirectory(prefix="vlmpipe-golden-") as folder:
        (spec,) = documents(compile_pipeline(config, "vertex", Path(folder, "pipeline.yaml")).path.read_bytes())
    found: dict[str, Any] = spec
    return found


@functools.cache
def graph(path: Path) -> dict[str, Any]:
    """The steps of a run file's pipeline on Vertex AI, as in its outline."""
    spec = on_vertex(load_shipped(path))
    return _tasks(spec, spec["root"])


def outline(config: RunConfig) -> dict[str, Any]:
    """The outline of the run file's pipeline for Vertex AI."""
    runs, spec = config.stage_runs(), on_vertex(config)
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    steps = _tasks(spec, spec["root"])
    return {
        "parameters": {
            name: {key: value for key, value in one.items() if key != "defaultValue" or name not in LEFT_OUT}
            for name, one in parameters.items()
        },
        "steps": steps,
        "jobs": {
            f"{stage}-{job}" if stage else job: job_spec(run, job, stage_run_id(RUN_URI, stage, list(runs)))
            for stage, run in runs.items()
            for job in jobs_of(run)
        },
        "on kubeflow": _on_kubeflow(config, steps),
    }


def _on_kubeflow(config: RunConfig, on_vertex: dict[str, Any]) -> dict[str, Any]:
    """What is different there: each step's image, machine and constants, what is said, and the training job."""
    with tempfile.TemporaryDirectory(prefix="vlmpipe-golden-") as folder:
        compiled = compile_pipeline(config, "kubeflow", Path(folder, "pipeline.yaml"))
        (spec,) = documents(compiled.path.read_bytes())
    there, here = (dict(_flat(steps)) for steps in (_tasks(spec, spec["root"]), on_vertex))
    changed = {path: value for path, value in there.items() if here.get(path) != value}
    (*_, last) = config.stage_runs().values()
    wanted = without_reducers(job_spec(last, "train", RUN_URI))
    where = placement(config.kubeflow, wanted)
    job = train_job("NAME", parse_job_spec(wanted), where, labels={STEP_LABEL: "train"}, run_uri=RUN_URI)
    return {"has no effect": [str(one) for one in compiled.unused], "steps": changed, "train": job}


def _flat(steps: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in steps.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _tasks(spec: dict[str, Any], component: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, task in component["dag"]["tasks"].items():
        inner = spec["components"][task["componentRef"]["name"]]
        given = task.get("inputs", {}).get("parameters", {})
        known = {
            "name": task["taskInfo"]["name"],
            "after": task.get("dependentTasks"),
            "when": task.get("triggerPolicy"),
            "caching": task.get("cachingOptions") or None,
            "retries": task.get("retryPolicy"),
            "inputs": {key: _shown(one) for key, one in given.items() if key not in LEFT_OUT},
            "outputs": sorted(kind for group in inner.get("outputDefinitions", {}).values() for kind in group),
        }
        if "dag" in inner:
            known["steps"] = _tasks(spec, inner)
        else:
            container = spec["deploymentSpec"]["executors"][inner["executorLabel"]]["container"]
            known |= {"image": container["image"], "machine": container.get("resources")}
        found[name] = {key: value for key, value in known.items() if value}
    return found


def _shown(given: dict[str, Any]) -> Any:
    """A constant, or which output, parameter or item it is."""
    if "runtimeValue" in given:
        return given["runtimeValue"]["constant"]
    (source,) = (value for key, value in given.items() if key != "parameterExpressionSelector")
    return f"{source['producerTask']}.{source['outputParameterKey']}" if "outputParameterKey" in source else source


def text(config: RunConfig) -> str:
    """The outline as it is kept."""
    plain = json.loads(json.dumps(outline(config)))  # what occurs twice is written twice, not as an alias
    return yaml.safe_dump(plain, sort_keys=False, width=120, allow_unicode=True)


def main() -> None:
    """Write the outlines, and only those."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.yaml"):
        old.unlink()
    for path in KEPT:
        config = load_shipped(path)
        (FOLDER / path.name).write_text(text(config))


if __name__ == "__main__":
    main()
