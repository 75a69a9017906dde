"""Step: prepares the data of one variant, and of all that share it."""


def prepare_variant(run_uri: str) -> str:
    """Prepare the training's data, or reuse data prepared before. What fails is recorded, and other variants go on.

    Args:
        run_uri: The training's folder.

    Returns:
        That folder.
    """
    from vlmpipe.components.runtime.sweep_steps import prepare_variant_data
    from vlmpipe.platforms.step_context import exit_on_error

    with exit_on_error():
        prepare_variant_data(run_uri)
    return run_uri
