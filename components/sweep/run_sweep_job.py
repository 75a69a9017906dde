"""Step: one job of a sweep on any target. A job that fails leaves the others."""


def run_sweep_job(job: str, step: str, target: str) -> str:
    """Run the job and watch it to its end.

    Args:
        job: The training's folder, or the number of the job and the run's folder.
        step: cache-features, or train-variants.
        target: vertex, kubeflow or local.

    Returns:
        How the job ended.
    """
    from vlmpipe.components.runtime.sweep_steps import encode_features, train_variants
    from vlmpipe.platforms.step_context import exit_on_error, stop_as_error

    with exit_on_error(), stop_as_error(step):
        return encode_features(job, target) if step == "cache-features" else train_variants(job, target)
