"""Step: the exit handler. Runs however the run ended, writes its report and says what happened."""

from kfp.dsl import PipelineTaskFinalStatus


def notify(run_id: str, job_name: str, root_uri: str, status: PipelineTaskFinalStatus) -> None:
    """Write the final report.html and a line for the log.

    An exit handler sees nothing of the other steps' outputs: it finds the run by its name.

    Args:
        run_id: Name of the run; empty takes job_name.
        job_name: Name of the pipeline job.
        root_uri: Root of the compiled pipeline.
        status: How the steps ended; given by the pipeline service.
    """
    import os

    from components.shell import STOPPED_VARIABLE, run_uri_of, step
    from components.steps import close_run

    run_uri = run_uri_of(root_uri, run_id, job_name)
    with step(run_uri, "notify", even_when_stopped=True) as progress:
        state = "stopped" if os.environ.get(STOPPED_VARIABLE) else status.state
        progress.finish(message=close_run(run_uri, state))
