"""Step: makes the page of what the audit job found. A job itself has no artifacts."""

from kfp.dsl import HTML, Metrics, Output


def collect_audit(run_uri: str, gcp_resources: str, metrics: Output[Metrics], page: Output[HTML]) -> str:
    """Write <run_uri>/audit/audit.html, with the images of the samples that the job audit flagged.

    Args:
        run_uri: The run's folder, which is also the output.
        gcp_resources: Output of the job step; taking it makes this step wait for the job.
    """
    from vlmpipe.audit.files import audit_counts, write_page
    from vlmpipe.platforms.step_context import exit_on_error

    with exit_on_error():
        audit, html = write_page(run_uri)
        for name, value in audit_counts(audit).items():
            metrics.log_metric(name, value)
        with open(page.path, "wb") as file:
            file.write(html)
    return run_uri
