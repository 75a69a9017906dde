"""A job step on Kubeflow: turns a CustomJob spec into a TrainJob and runs it to its end.

Settings of the cluster come from the section `kubeflow` of the run's own run.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.run_settings import RunSettings
from vlmpipe.config.sections.kubeflow import KubeflowConfig
from vlmpipe.job_spec.forms import CustomJobSpec
from vlmpipe.job_spec.parse import parse_job_spec
from vlmpipe.job_spec.worker_pools import REDUCTION_SERVER_POOL, STEP_LABEL, is_reducers
from vlmpipe.platforms.jobs.finished_program import FinishedProgram
from vlmpipe.platforms.jobs.step_record import recorded_job
from vlmpipe.platforms.kubeflow.jobs.manifest import GROUP, PLURAL, VERSION, job_name, train_job
from vlmpipe.platforms.kubeflow.jobs.watch import Watch, stoppable
from vlmpipe.trainer.records.step import read_step
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage

SYSTEM_CPUS = 1.0  # of a machine, for Kubernetes and the system; a generous estimate
SYSTEM_MEMORY_SHARE = 0.2
FIRST_STEP = "resolve-run"


def run_on_kubeflow(display_name: str, job_spec: CustomJobSpec, *, labels: Mapping[str, str]) -> str:
    """Run the job and return its `gcp_resources`, a JSON text that names the TrainJob.

    `job_spec` has the fields of the API's CustomJobSpec. Must be called from the main thread: it takes over SIGINT and
    SIGTERM, on which it deletes the TrainJob. Raises UserError with the failing node's exit code when the job fails,
    and ConfigError for a job that Kubeflow cannot run.
    """
    uri = job_spec["base_output_directory"]["output_uri_prefix"]
    store, step = open_storage(uri), labels[STEP_LABEL]
    with recorded_job(store, step) as record:
        name = job_name(display_name, uri, step, _start_of(store))
        job = parse_job_spec(without_reducers(job_spec))
        section = placement(RunSettings.require(store).kubeflow, job_spec)
        body = train_job(name, job, section, labels=labels, run_uri=uri)
        from vlmpipe.platforms.kubeflow.jobs.client import Jobs  # the client takes a second to import

        jobs = Jobs()
        with stoppable() as wait:
            Watch(jobs, body, wait=wait, starting=record.open, program=FinishedProgram(store, step)).run()
    path = f"apis/{GROUP}/{VERSION}/namespaces/{jobs.namespace}/{PLURAL}/{name}"
    return json.dumps({"resources": [{"resourceType": "TrainJob", "resourceUri": path}]})


def without_reducers(job_spec: CustomJobSpec) -> dict[str, object]:
    """The spec without a Reduction Server, which no cluster has. Prints that it is left out."""
    pools = list(job_spec["worker_pool_specs"])
    if len(pools) > REDUCTION_SERVER_POOL and is_reducers(pools[REDUCTION_SERVER_POOL]):
        print("the Reduction Server, a service of Vertex AI, is left out: NCCL sums among the nodes", flush=True)
        pools = pools[:REDUCTION_SERVER_POOL]
    return {**job_spec, "worker_pool_specs": pools}


def _start_of(store: Storage) -> str:
    """Start time of the run's first step, which identifies this start of the run.

    A retried step reads the same value. A resumed run repeats its first step, and gets another one.
    """
    record = read_step(store, FIRST_STEP)
    return str(record.started_s) if record else ""


def placement(section: KubeflowConfig, job_spec: CustomJobSpec) -> KubeflowConfig:
    """The section, with CPUs and memory of 0 replaced by what a machine of the job's type leaves for a pod."""
    machine_type = job_spec["worker_pool_specs"][0].get("machine_spec", {}).get("machine_type", "")
    if not (machine := load_catalog().machines.get(machine_type)):
        return section
    cpus = section.cpus or max(machine.vcpus - SYSTEM_CPUS, 0.5)
    memory_gib = section.memory_gib or machine.memory_gib * (1 - SYSTEM_MEMORY_SHARE)
    return section.model_copy(update={"cpus": cpus, "memory_gib": memory_gib})
