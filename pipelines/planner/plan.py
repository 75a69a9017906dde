"""`vlmpipe plan`: the machines of each job, and rows and steps where the data is already prepared."""

from __future__ import annotations

from typing import Any

from pipelines.config import RunConfig
from pipelines.planner.job_spec import JOBS, check_job_spec, job_spec
from trainer.config import JobConfig, RunPaths
from trainer.errors import UserError
from trainer.storage import join_uri, open_storage

ROLES = ("chief", "workers", "Reduction Server", "evaluators")
NOT_ESTIMATED = "Memory, time and cost are not estimated by this version."


def plan_run(config: RunConfig) -> dict[str, Any]:
    """The plan in JSON's types: name, jobs (worker pools by job), data (or None) and notes, sentences for people.

    Raises ConfigError for a job that Vertex AI would refuse.
    """
    paths = RunPaths(run_id=config.name, root_uri=config.root_uri("local"))
    jobs = {}
    for job in JOBS:
        spec = job_spec(config, job, paths.run_uri)
        check_job_spec(spec)
        jobs[job] = [_pool(number, pool) for number, pool in enumerate(spec["worker_pool_specs"])]
    data, note = _data(config, paths)
    cluster, train = config.cluster, config.train
    passes = train.global_batch_rows // (cluster.world_size * train.micro_batch_rows)
    notes = [
        f"Training: {train.strategy} on {cluster.world_size} ranks, {train.global_batch_rows} rows a step; "
        f"each rank runs {passes} x {train.micro_batch_rows}.",
        note,
        NOT_ESTIMATED,
    ]
    return {"name": config.name, "jobs": jobs, "data": data, "notes": notes}


def _pool(number: int, pool: dict[str, Any]) -> dict[str, Any]:
    machine, disk, container = pool["machine_spec"], pool.get("disk_spec", {}), pool["container_spec"]
    args = container.get("args", [])
    return {
        "role": f"{number} {ROLES[number]}",
        "replica_count": pool["replica_count"],
        "machine_type": machine["machine_type"],
        "accelerator_type": machine.get("accelerator_type", ""),
        "accelerator_count": machine.get("accelerator_count", 0),
        "boot_disk_type": disk.get("boot_disk_type", ""),
        "boot_disk_size_gb": disk.get("boot_disk_size_gb", 0),
        "image_uri": container["image_uri"],
        "runs": args[args.index("--") + 1] if "--" in args else "",
    }


def _data(config: RunConfig, paths: RunPaths) -> tuple[dict[str, Any] | None, str]:
    """Rows and steps from prepared data under the local root, and a sentence about them."""
    from trainer.data.index import Index
    from trainer.data.prepare import DONE, fingerprint
    from trainer.data.sequence import RowSequence

    if "://" in config.data.source + paths.root_uri:
        return None, "Data: rows and steps are known after preparation, which happens in the run."
    job = JobConfig.model_validate(config.to_run_json(paths))
    try:
        uri = join_uri(paths.prepared_root, fingerprint(job))
    except UserError as error:
        return None, f"Data: {error.found}."
    if open_storage(uri).stat(DONE) is None:
        return None, "Data: not prepared yet; rows and steps are known after preparation."
    split = Index.load(uri).split("train")
    sequence = RowSequence(
        split,
        row_tokens=job.data.row_tokens,
        row_images=job.data.row_images,
        seed=job.train.seed,
        global_batch_rows=job.train.global_batch_rows,
        pack=job.data.pack,
    )
    first = sequence.plan(0)
    steps = sequence.num_steps(job.train.epochs)
    if job.train.max_steps:
        steps = min(steps, job.train.max_steps)
    data = {"prepared_uri": uri, "samples": len(split), "rows": len(first), "fill": first.fill, "steps": steps}
    return data, (
        f"Data: {len(split):,} training samples in {len(first):,} rows of {job.data.row_tokens:,} tokens "
        f"({100 * first.fill:.0f} % filled); {steps:,} steps."
    )
