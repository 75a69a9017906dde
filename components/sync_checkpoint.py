"""Step: the newest good checkpoint becomes a Hugging Face model."""

from kfp.dsl import Model, Output


def sync_checkpoint(run_uri: str, model: Output[Model]) -> str:
    """Export the newest checkpoint that verifies to <run_uri>/export, which plain from_pretrained loads.

    Args:
        run_uri: The run's folder, which is also the output.
    """
    from components.shell import step

    with step(run_uri, "sync-checkpoint") as progress:
        from trainer.checkpoint.export import export_run
        from trainer.config import JobConfig

        exported = export_run(JobConfig.load(f"{run_uri}/run.json"))
        state = "reused" if exported.get("reused") else "done"
        progress.finish(state, f"checkpoint {exported['checkpoint']} exported to {run_uri}/export")
    model.uri = f"{run_uri}/export"
    model.metadata.update({"checkpoint": exported["checkpoint"], "step": exported["step"]})
    return run_uri
