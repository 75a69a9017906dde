"""What is kept of each shipped run file's pipeline, so that a change of it is seen in review: tests/fixtures/pipelines.

    python -m tests.golden_pipelines

writes the outlines anew. An outline has the graph, each step's image, machine, retries, display name and constants, the
parameters of the console, and the jobs with their worker pools. It has not the steps' source, which is reviewed where
it stands, nor the run file with its defaults, whose reference is docs/reference/run-file.md.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import yaml

from pipelines.compile import compile_pipeline
from pipelines.config import RunConfig, load_run_file
from pipelines.pipeline_file import documents
from pipelines.planner.job_spec import JOBS, job_spec

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests/fixtures/pipelines"
RUN_URI = "gs://example-bucket/vlmpipe/runs/RUN"
LEFT_OUT = ("run_file", "compiled")  # the run file in one form or another


def outline(config: RunConfig) -> dict[str, Any]:
    """The outline of the run file's pipeline for Vertex AI."""
    with tempfile.TemporaryDirectory(prefix="vlmpipe-golden-") as folder:
        (spec,) = documents(compile_pipeline(config, "vertex", Path(folder, "pipeline.yaml")).path.read_bytes())
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    return {
        "parameters": {
            name: {key: value for key, value in one.items() if key != "defaultValue" or name not in LEFT_OUT}
            for name, one in parameters.items()
        },
        "steps": _tasks(spec, spec["root"]),
        "jobs": {job: job_spec(config, job, RUN_URI) for job in JOBS},
    }


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
    """Write all outlines, and only those."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.yaml"):
        old.unlink()
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config = load_run_file(path)
        (FOLDER / path.name).write_text(text(config))


if __name__ == "__main__":
    main()
