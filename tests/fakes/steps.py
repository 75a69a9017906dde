"""Stand-ins for the pipeline's steps: same names, inputs and outputs, but each only notes that it ran.

They show the graph at work under the real kfp.local. What they answer comes from the environment: TEST_FEATURES and
TEST_DECISION ("killed" ends the step with SIGKILL), TEST_FAIL (a job that ends with exit code 65) and TEST_TRACE,
the file they append their names to.
"""

import inspect
import linecache
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from kfp.dsl import HTML, ClassificationMetrics, Metrics, Model, Output, PipelineTaskFinalStatus

from vlmpipe.platforms.job_step import run_custom_job


def prepare_data(run_uri: str, metrics: Output[Metrics]) -> NamedTuple(
    "Outputs", [("prepared_uri", str), ("features", str)]
):  # type: ignore[valid-type]
    import os

    from vlmpipe.trainer.data.shards.prepared_files import DONE, FORMAT, Manifest
    from vlmpipe.trainer.storage import open_storage
    from vlmpipe.trainer.storage.records import write_record

    with open(os.environ["TEST_TRACE"], "a", encoding="utf-8") as trace:
        trace.write("prepare-data\n")
    store = open_storage(run_uri)
    store.write(f"prepared/{DONE}", Manifest(format=FORMAT, fingerprint="", counts={"images": 3}, files={}).to_bytes())
    prepared = store.uri("prepared")
    write_record(store, "prepared.json", {"prepared_uri": prepared, "features_uri": prepared, "features": "off"})
    return (prepared, os.environ["TEST_FEATURES"])


def plan_data(run_uri: str) -> list[str]:
    import os

    from vlmpipe.components.runtime.prepared_data import shares_of

    with open(os.environ["TEST_TRACE"], "a", encoding="utf-8") as trace:
        trace.write("plan-data\n")
    return shares_of(run_uri, int(os.environ["TEST_TASKS"]), "fingerprint")


def prepare_chunks(share: str) -> int:
    import os

    from vlmpipe.components.runtime.prepared_data import read_share

    task, tasks, _, run_uri = read_share(share)
    with open(os.environ["TEST_TRACE"], "a", encoding="utf-8") as trace:
        trace.write(f"prepare-chunks {task} of {tasks} for {os.path.basename(run_uri)}\n")
    return task


def hold_data(run_uri: str, metrics: Output[Metrics]) -> NamedTuple(
    "Outputs", [("prepared_uri", str), ("features", str)]
):  # type: ignore[valid-type]
    import os
    import signal

    from vlmpipe.platforms.step_context import step_context

    with open(os.environ["TEST_ALIVE"], "w", encoding="utf-8"), step_context(run_uri, "prepare-data"):
        print("ready", flush=True)
        signal.pause()
    return ("somewhere", "off")


def _job(inputs):  # type: ignore[no-untyped-def]  # kfp runs this source in a process of its own
    import os

    from vlmpipe.job_spec.parse import parse_job_spec
    from vlmpipe.platforms.step_context import step_context
    from vlmpipe.trainer.errors import DataError

    name, run_uri = inputs["labels"]["vlmpipe-step"], inputs["base_output_directory"]
    with open(os.environ["TEST_TRACE"], "a", encoding="utf-8") as trace:
        trace.write(f"{name}\n")
    with step_context(run_uri, name):
        scheduling = {"strategy": inputs["strategy"]}
        job = parse_job_spec({"worker_pool_specs": inputs["worker_pool_specs"], "scheduling": scheduling})
        assert job.worker_pool_specs[0].container_spec.args[-1] == f"{run_uri}/run.json"
        if os.environ.get("TEST_FAIL") == name:
            raise DataError("the picture is upside down")
    return (name,)


def job_step() -> Callable[..., object]:
    """A stand-in for the job's step: its own inputs and output, which are written there, around `_job`."""
    head, _, _ = inspect.getsource(run_custom_job).partition('    """')
    body = f"inputs = dict(locals())\n{inspect.getsource(_job)}\nreturn _job(inputs)\n"
    source, file = head + textwrap.indent(body, "    "), "<the job's step>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # where kfp looks for it
    names: dict[str, Any] = {"NamedTuple": NamedTuple}
    exec(compile(source, file, "exec"), names)
    step: Callable[..., object] = names["run_custom_job"]
    return step


def collect_features(run_uri: str, gcp_resources: str, metrics: Output[Metrics]) -> str:
    import os

    with open(os.environ["TEST_TRACE"], "a", encoding="utf-8") as trace:
        trace.write(f"collect-{gcp_resources}\n")
    return run_uri


def sync_checkpoint(
    run_uri: str, gcp_resources: str, model: Output[Model], metrics: Output[Metrics], report: Output[HTML]
) -> str:
    import os

    from vlmpipe.trainer.storage import open_storage
    from vlmpipe.trainer.storage.export_manifest import write_description

    with open(os.environ["TEST_TRACE"], "a", encoding="utf-8") as trace:
        trace.write("sync-checkpoint\n")
    write_description(open_storage(run_uri), {"files": {}})
    return run_uri


def decide(
    run_uri: str,
    gcp_resources: str,
    evaluation: Output[Metrics],
    confusion: Output[ClassificationMetrics],
    metrics: Output[Metrics],
    report: Output[HTML],
) -> str:
    import os
    import signal

    from vlmpipe.platforms.step_context import step_context

    with open(os.environ["TEST_TRACE"], "a", encoding="utf-8") as trace:
        trace.write("decide\n")
    with step_context(run_uri, "decide") as progress:
        progress.update(0, answer=os.environ["TEST_DECISION"])
        if os.environ["TEST_DECISION"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return os.environ["TEST_DECISION"]


def register_model(run_uri: str, model: Output[Model]) -> str:
    import os

    from vlmpipe.platforms.step_context import step_context

    with open(os.environ["TEST_TRACE"], "a", encoding="utf-8") as trace, step_context(run_uri, "register-model"):
        trace.write("register-model\n")
    return "registered"


def notify(
    run_id: str, job_name: str, root_uri: str, webhook: str, last_step: str, status: PipelineTaskFinalStatus
) -> None:
    import os

    with open(os.environ["TEST_TRACE"], "a", encoding="utf-8") as trace:
        trace.write(f"notify {run_id or job_name} {status.state}\n")


def replace_steps(monkeypatch: pytest.MonkeyPatch, *, kept: str = "") -> None:
    """Put the stand-ins in the place of all steps that need data, a model or a report, but for the one that is kept."""
    preparing = (plan_data, prepare_chunks, prepare_data, collect_features)
    for step in (*preparing, sync_checkpoint, decide, register_model, notify):
        if step.__name__ != kept:
            monkeypatch.setattr(f"vlmpipe.pipelines.training.{step.__name__}", step)
    monkeypatch.setattr("vlmpipe.platforms.local.graph.run_custom_job", job_step())
