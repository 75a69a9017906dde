"""Step: registers an accepted model as the next version and the champion, and uploads it to the hub if asked."""

from kfp.dsl import Model, Output


def register_model(run_uri: str, model: Output[Model]) -> str:
    """Register the run's export, and upload it to the hub if the run file says so.

    Args:
        run_uri: The run's folder.

    Returns:
        Where the registered model lies.
    """
    from vlmpipe.platforms.step_context import step_context
    from vlmpipe.registry.hub import upload_registered
    from vlmpipe.registry.release import register_run

    with step_context(run_uri, "register-model") as progress:
        entry = register_run(run_uri)
        commit = upload_registered(run_uri)
        uploaded = f", uploaded as {commit}" if commit else ""
        progress.finish(message=f"{entry.model} version {entry.version} in {entry.model_uri}{uploaded}")
    model.uri = entry.model_uri
    model.metadata.update({"model": entry.model, "version": entry.version, "run_id": entry.run_id})
    if entry.resource:
        model.metadata["resourceName"] = entry.resource
    if commit:
        model.metadata["hub_commit"] = commit
    return str(entry.model_uri)
