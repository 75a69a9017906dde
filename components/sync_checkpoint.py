"""Step: mirrors the newest good checkpoint and exports it as a Hugging Face model."""

from kfp.dsl import Model, Output


def sync_checkpoint(run_uri: str, model: Output[Model]) -> str:
    """Export the newest checkpoint that verifies to <run_uri>/export, which plain from_pretrained loads.

    Before that it is copied to checkpoint.mirror_uri, if the run file names one.

    Args:
        run_uri: The run's folder, which is also the output.
    """
    from components.runtime.step_context import step_context

    with step_context(run_uri, "sync-checkpoint") as progress:
        from components.runtime.step_logic import sync_model
        from trainer.config.job import JobConfig

        exported = sync_model(JobConfig.load(f"{run_uri}/run.json"))
        state = "reused" if exported.get("reused") else "done"
        copied = f", mirrored to {exported['mirror']}" if exported["mirror"] else ""
        progress.finish(state, f"checkpoint {exported['checkpoint']} exported to {run_uri}/export{copied}")
    model.uri = f"{run_uri}/export"
    model.metadata.update({name: exported[name] for name in ("checkpoint", "step", "weights_sha256", "mirror")})
    return run_uri
