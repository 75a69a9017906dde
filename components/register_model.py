"""Step: registers an accepted model as the next version and the champion."""

from kfp.dsl import Model, Output


def register_model(run_uri: str, model: Output[Model]) -> str:
    """Register the run's export.

    Args:
        run_uri: The run's folder.

    Returns:
        Where the registered model lies.
    """
    from components.runtime.step_context import step_context
    from vlmpipe.registry.release import register_run

    with step_context(run_uri, "register-model") as progress:
        entry = register_run(run_uri)
        progress.finish(message=f"{entry.model} version {entry.version} in {entry.model_uri}")
    model.uri = entry.model_uri
    model.metadata.update({"model": entry.model, "version": entry.version, "run_id": entry.run_id})
    if entry.resource:
        model.metadata["resourceName"] = entry.resource
    return str(entry.model_uri)
