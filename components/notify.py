"""Step: the exit handler, which runs after every run. Writes the report and notifies the webhook."""

from kfp.dsl import PipelineTaskFinalStatus


def notify(
    run_id: str, job_name: str, root_uri: str, webhook: str, last_step: str, status: PipelineTaskFinalStatus
) -> None:
    """Write the final report.html, log the run in gcp.experiment and notify the webhook.

    An exit handler does not get the other steps' outputs: it finds the run by its name.

    Args:
        run_id: Name of the run; empty takes job_name.
        job_name: Name of the pipeline job.
        root_uri: Root of the compiled pipeline.
        webhook: Address, or name of the Secret Manager secret that holds it; empty for none.
        last_step: The step that completes an accepted run.
        status: How the steps ended, in the pipeline service's words; a hint, the run's own records decide.
    """
    import os
    from urllib.parse import quote

    from vlmpipe.components.runtime.folder_lock import leaving_folder
    from vlmpipe.components.runtime.run_results import close_run
    from vlmpipe.components.runtime.vertex_experiments import log_run
    from vlmpipe.components.runtime.webhook import send_notification
    from vlmpipe.platforms.step_context import STOPPED_VARIABLE, exit_on_error, step_context
    from vlmpipe.runs.ending import FIRST, Ending, ending_of
    from vlmpipe.trainer.config.job import require_run_id, run_uri_of
    from vlmpipe.trainer.errors import ConfigError, ExitCode
    from vlmpipe.trainer.storage import open_storage

    try:
        require_run_id(run_id or job_name)
    except ConfigError as error:  # as the first step said; nothing is written outside the runs' folder
        refused = run_uri_of(root_uri, quote(run_id or job_name, safe=""), "")
        print(send_notification(webhook, refused, Ending("failed", FIRST, int(error.code), error.found)), flush=True)
        return
    run_uri = run_uri_of(root_uri, run_id, job_name)
    with exit_on_error(even_when_stopped=True), leaving_folder(open_storage(run_uri), job_name) as holder:
        if holder:  # as the first step said; nothing is written into the other job's folder
            problem = f"pipeline job {holder.job_name} holds the run's folder"
            print(send_notification(webhook, run_uri, Ending("failed", FIRST, int(ExitCode.UNAVAILABLE), problem)))
            return
        word = "stopped" if os.environ.get(STOPPED_VARIABLE) else status.state
        with step_context(run_uri, "notify", even_when_stopped=True) as progress:
            ending = ending_of(
                run_uri, job_name=job_name, last_step=last_step, word=word, error=status.error_message or ""
            )
            notes = []
            try:
                notes.append(close_run(run_uri, ending.outcome))
            finally:  # also of a run whose report cannot be written
                notes += [ending.note, send_notification(webhook, run_uri, ending), log_run(run_uri, ending.outcome)]
                print("\n".join(filter(None, notes[-3:])), flush=True)
            progress.finish(message="; ".join(filter(None, notes)))
