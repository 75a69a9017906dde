"""Step: the exit handler, which runs after every run. Writes the report and notifies the webhook."""

from kfp.dsl import PipelineTaskFinalStatus


def notify(run_id: str, job_name: str, root_uri: str, webhook: str, status: PipelineTaskFinalStatus) -> None:
    """Write the final report.html, log the run in gcp.experiment and notify the webhook.

    An exit handler does not get the other steps' outputs: it finds the run by its name.

    Args:
        run_id: Name of the run; empty takes job_name.
        job_name: Name of the pipeline job.
        root_uri: Root of the compiled pipeline.
        webhook: Address, or name of the Secret Manager secret that holds it; empty for none.
        status: How the steps ended; given by the pipeline service.
    """
    import os

    from components.runtime.step_context import STOPPED_VARIABLE, step_context
    from components.runtime.step_logic import close_run
    from components.runtime.vertex_experiments import log_run
    from components.runtime.webhook import send_notification
    from trainer.config.job import run_uri_of

    run_uri = run_uri_of(root_uri, run_id, job_name)
    state = "stopped" if os.environ.get(STOPPED_VARIABLE) else status.state
    with step_context(run_uri, "notify", even_when_stopped=True) as progress:
        said = []
        try:
            said.append(close_run(run_uri, state))
        finally:  # also of a run whose report cannot be written
            said += [send_notification(webhook, run_uri, state, status.error_message or ""), log_run(run_uri, state)]
            print("\n".join(filter(None, said[-2:])), flush=True)
        progress.finish(message="; ".join(filter(None, said)))
