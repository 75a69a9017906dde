"""Step: merges the pipeline's parameters into the run's own run file and the worker pools of its jobs."""

from typing import Any, NamedTuple


# KFP makes the step of this source, so that its inputs are written out here: those of parameters.PARAMETERS (a test
# compares them).
def resolve_run(
    run_file: str,
    compiled: str,
    run_id: str,
    job_name: str,
    data_uri: str,
    epochs: int,
    max_steps: int,
    learning_rate: float,
    seed: int,
    resume: str,
    min_exact_match: float,
    overrides: str,
) -> NamedTuple(  # type: ignore[valid-type]
    "Outputs",
    [
        ("run_uri", str),
        ("features_pools", list[dict[str, Any]]),
        ("train_pools", list[dict[str, Any]]),
        ("evaluate_pools", list[dict[str, Any]]),
        ("benchmark_pools", list[dict[str, Any]]),
        ("audit_pools", list[dict[str, Any]]),
        ("stage_state", str),
    ],
):
    """Check the run file with this run's parameters and write run.json into the run's folder.

    Args:
        run_file: The run file, as a JSON text.
        compiled: Target, root, fixed settings and parameter defaults of the compiled pipeline, as a JSON text.
        run_id: Name of the run; empty takes job_name.
        job_name: Name of the pipeline job.
        data_uri: See the pipeline's parameters, as for all that follow.

    Returns:
        run_uri: The run's folder.
        stage_state: accepted where an earlier attempt of the run finished this stage with these settings, else open.
    """
    inputs = dict(locals())
    from vlmpipe.components.runtime.differences import record_differences
    from vlmpipe.components.runtime.folder_lock import take_folder
    from vlmpipe.components.runtime.job_states import state_of_job, this_job
    from vlmpipe.components.runtime.resolve import resolve
    from vlmpipe.config.sections.stages import run_uri
    from vlmpipe.platforms.step_context import exit_on_error, step_context
    from vlmpipe.platforms.table import platform_of
    from vlmpipe.records.compiled import CompiledSettings
    from vlmpipe.registry.release import was_accepted
    from vlmpipe.trainer.config.job import run_uri_of
    from vlmpipe.trainer.storage import open_storage

    with exit_on_error():
        uri = run_uri(compiled, run_id, job_name)
        settings = CompiledSettings.read(compiled)
        is_local = platform_of(settings.target).is_here  # whose runs hold a lock
        whole = run_uri_of(settings.root_uri, run_id, job_name)
        if not is_local and (note := take_folder(open_storage(whole), this_job(compiled, job_name), state_of_job)):
            print(note, flush=True)
    with step_context(uri, "resolve-run") as progress:
        progress.update(0, job_name=job_name)  # whose records these are: notify counts no other job's
        resolved = resolve(**inputs)
        record_differences(progress, resolved.differences, resolved.since_last_start)
        stage_state = "accepted" if was_accepted(resolved.run_uri) else "open"
        progress.finish(message=f"run file and job specs are valid; output in {resolved.run_uri}")
    return (
        resolved.run_uri,
        resolved.features_pools,
        resolved.train_pools,
        resolved.evaluate_pools,
        resolved.benchmark_pools,
        resolved.audit_pools,
        stage_state,
    )
