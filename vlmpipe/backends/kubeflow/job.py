"""A job step on Kubeflow: turns a CustomJob spec into a TrainJob and runs it to its end.

What the cluster must know beside the spec is in the section `kubeflow` of the run's own run.json.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from trainer.errors import ConfigError, ExitCode, UserError
from trainer.storage import open_storage
from trainer.storage.base import Storage
from trainer.storage.records import read_record
from vlmpipe.backends.kubeflow.manifest import GROUP, PLURAL, VERSION, Placement, job_name, train_job
from vlmpipe.backends.kubeflow.watch import Jobs, Watch, stoppable
from vlmpipe.backends.step_record import close_record, open_record
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.kubeflow import KubeflowConfig
from vlmpipe.job_spec.parse import parse_job_spec
from vlmpipe.job_spec.worker_pools import REDUCTION_SERVER_POOL, STEP_LABEL, is_reducers

SYSTEM_CPUS = 1.0  # of a machine: what Kubernetes and the system keep for themselves, generously
SYSTEM_MEMORY_SHARE = 0.2
FIRST_STEP = "steps/resolve-run.json"


def run_on_kubeflow(
    display_name: str, job_spec: Mapping[str, Any], *, labels: Mapping[str, str], jobs: Jobs | None = None
) -> str:
    """Run the job and return its `gcp_resources`, a JSON text that names the TrainJob.

    `job_spec` has the fields of the API's CustomJobSpec. Must be called from the main thread: it takes over SIGINT and
    SIGTERM, on which it deletes the TrainJob. Raises UserError with the failing node's exit code when the job fails,
    and ConfigError for a job that Kubeflow cannot run.
    """
    uri = job_spec["base_output_directory"]["output_uri_prefix"]
    store, step = open_storage(uri), labels[STEP_LABEL]
    started: list[float] = []
    try:
        name = job_name(display_name, uri, step, _start_of(store))
        body = train_job(
            name,
            parse_job_spec(without_reducers(job_spec)),
            placement(_section(store), job_spec),
            labels=labels,
            run_uri=uri,
        )
        if jobs is None:
            from vlmpipe.backends.kubeflow.client import Jobs as KubernetesJobs  # the client takes a second to import

            jobs = KubernetesJobs()
        with stoppable() as wait:
            Watch(jobs, body, wait=wait, starting=lambda: started.append(open_record(store, step))).run()
    except UserError as error:
        _close_failed(store, step, error, started)
        raise
    if started:
        close_record(store, step, "done", "", started[0], {"exit_code": 0})
    path = f"apis/{GROUP}/{VERSION}/namespaces/{jobs.namespace}/{PLURAL}/{name}"
    return json.dumps({"resources": [{"resourceType": "TrainJob", "resourceUri": path}]})


def without_reducers(job_spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec without a Reduction Server, which is said: no cluster has one."""
    pools = list(job_spec["worker_pool_specs"])
    if len(pools) > REDUCTION_SERVER_POOL and is_reducers(pools[REDUCTION_SERVER_POOL]):
        print("the Reduction Server, a service of Vertex AI, is left out: NCCL sums among the nodes", flush=True)
        pools = pools[:REDUCTION_SERVER_POOL]
    return {**job_spec, "worker_pool_specs": pools}


def _close_failed(store: Storage, step: str, error: UserError, started: list[float]) -> None:
    state = "stopped" if error.code == ExitCode.PREEMPTED else "failed"
    detail = {"exit_code": int(error.code), "error": error.text()}
    with contextlib.suppress(UserError):  # where it cannot be written, the error itself is what matters
        close_record(store, step, state, error.found.splitlines()[0], started[0] if started else None, detail)


def _start_of(store: Storage) -> str:
    """What tells this start of the run from an earlier one: when its first step began.

    A step that is tried again finds the same; a run that is continued begins with that step anew.
    """
    if store.stat(FIRST_STEP) is None:
        return ""
    return str(read_record(store, FIRST_STEP)["started_s"])


def _section(store: Storage) -> KubeflowConfig:
    if store.stat("run.json") is None:
        raise ConfigError(f"no run.json in {store.uri('')}", expected="the run's folder, in which resolve-run wrote it")
    return KubeflowConfig.model_validate(read_record(store, "run.json").get("kubeflow", {}))


def placement(section: KubeflowConfig, job_spec: Mapping[str, Any]) -> Placement:
    """What the cluster must know: the section, with what a machine of that type leaves for CPUs and memory of 0."""
    machine_type = job_spec["worker_pool_specs"][0].get("machine_spec", {}).get("machine_type", "")
    machine = load_catalog().machines.get(machine_type)
    cpus = section.cpus or (max(machine.vcpus - SYSTEM_CPUS, 0.5) if machine else 0.0)
    memory_gib = section.memory_gib or (machine.memory_gib * (1 - SYSTEM_MEMORY_SHARE) if machine else 0.0)
    return Placement(
        runtime=section.runtime,
        service_account=section.service_account,
        queue=section.queue,
        node_selector=section.node_selector,
        tolerations=[one.model_dump() for one in section.tolerations],
        cpus=cpus,
        memory_gib=memory_gib,
    )
