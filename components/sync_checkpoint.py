"""Step: collects the results of training, mirrors the newest good checkpoint and exports it as a Hugging Face model."""

from kfp.dsl import HTML, Metrics, Model, Output


def sync_checkpoint(
    run_uri: str, gcp_resources: str, model: Output[Model], metrics: Output[Metrics], report: Output[HTML]
) -> str:
    """Export the newest checkpoint that verifies to <run_uri>/export, which plain from_pretrained loads.

    Then the checkpoint is copied to checkpoint.mirror_uri, if the run file names one. champion.json names the model in
    use, which the evaluation asks the same questions.

    Args:
        run_uri: The run's folder, which is also the output.
        gcp_resources: Output of the training job's step; taking it makes this step wait for the job.
    """
    from vlmpipe.platforms.step_context import step_context

    with step_context(run_uri, "sync-checkpoint") as progress:
        from vlmpipe.components.runtime.run_results import job_metrics, sync_model
        from vlmpipe.registry.release import point_to_champion
        from vlmpipe.report.build import build_report
        from vlmpipe.trainer.config.job import JobConfig

        exported = sync_model(JobConfig.load(f"{run_uri}/run.json"))
        point_to_champion(run_uri)
        for name, value in job_metrics(run_uri, "train").items():
            metrics.log_metric(name, value)
        with open(report.path, "w", encoding="utf-8") as file:  # of training: the page shows what there is by then
            file.write(build_report(run_uri))
        state = "reused" if exported.get("reused") else "done"
        copied = f", mirrored to {exported['mirror']}" if exported["mirror"] else ""
        progress.finish(state, f"checkpoint {exported['checkpoint']} exported to {run_uri}/export{copied}")
    model.uri = f"{run_uri}/export"
    model.metadata.update({name: exported[name] for name in ("checkpoint", "step", "weights_sha256", "mirror")})
    return run_uri
