"""Step: checks a run file and creates the run's folder, for pipelines of your own."""


def open_run(run_file: str, root_uri: str, run_id: str, overrides: str = "", target: str = "local") -> str:
    """Check the run file and write run.json into the run's folder, <root_uri>/runs/<run_id>.

    Args:
        run_file: The run file, as YAML or JSON text.
        root_uri: Folder or gs:// prefix that holds runs, prepared data and features.
        run_id: Name of the run.
        overrides: Fields to replace, as a JSON object of dotted keys, such as {"train.epochs": 2}.
        target: Where run_job is to run the run's jobs: vertex, kubeflow or local. Settings that it needs are required
            and, but for local, the run is planned: a red plan ends here.

    Returns:
        The run's folder, which the other components take.
    """
    from vlmpipe.components.runtime.resolve import open_run_folder
    from vlmpipe.platforms.step_context import exit_on_error

    with exit_on_error():
        return open_run_folder(run_file, root_uri, run_id=run_id, overrides=overrides, target=target)
