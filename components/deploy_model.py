"""Step: serves a registered model, and takes it back if it answers otherwise than evaluated."""


def deploy_model(run_uri: str, where: str) -> str:
    """Deploy the run's registered model.

    Args:
        run_uri: The run's folder.
        where: The pipeline's target: vertex, kubeflow or local.

    Returns:
        The run's folder.
    """
    from vlmpipe.components.runtime.deploy import deploy_run
    from vlmpipe.platforms.step_context import step_context

    with step_context(run_uri, "deploy-model") as progress:
        agreement = deploy_run(run_uri, where)
        progress.finish(message=agreement.sentence())
    return run_uri
