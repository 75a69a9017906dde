"""Sends metrics to an MLflow tracking server or store where `train.mlflow.tracking_uri` is set.

A run that cannot reach it trains without it. The MLflow run carries the run's id as a tag, so that the next attempt
continues the same curves. Metrics are sent by a thread of their own: a slow server must not hold up steps.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from vlmpipe.trainer.errors import print_warning, require_package
from vlmpipe.trainer.threads import thread_pool

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from vlmpipe.trainer.config.job import JobConfig

RUN_TAG = "vlmpipe.run_id"
FINISH_S = 60.0
MAX_PARAMS, MAX_CHARS = 100, 500  # of one request, of a value
# Of the library, which would otherwise try for minutes.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


class MlflowLog:
    """The metrics in MLflow. After the first error it prints a warning and sends nothing more."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client, self._run_id = client, run_id
        self._thread = thread_pool(1, name="mlflow")
        self._sent: list[Future[None]] = []
        self._is_broken = False

    def write(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(f"train/{name}", float(value), now_ms, step) for name, value in values.items()]
        self._sent.append(self._thread.submit(self._client.log_batch, self._run_id, metrics))
        self._look(0.0, f"no metrics from about step {step} on")

    def close(self) -> None:
        self._sent.append(self._thread.submit(self._client.set_terminated, self._run_id))
        self._look(FINISH_S, "the last metrics may be missing there")
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _look(self, wait_s: float, missing: str) -> None:
        """Raise the errors of sent requests; wait_s: for what is still under way."""
        until = time.monotonic() + wait_s
        while self._sent and not self._is_broken and (wait_s or self._sent[0].done()):
            try:
                self._sent.pop(0).result(timeout=max(0.0, until - time.monotonic()))
            except Exception as error:  # a copy of the metrics must never end training
                self._is_broken = True
                self._thread.shutdown(wait=False, cancel_futures=True)
                self._thread = thread_pool(1, name="mlflow")
                _warn(error, missing)


def open_mlflow(job: JobConfig) -> MlflowLog | None:
    """Open the run's log in MLflow. Returns None without a tracking URI.

    Also returns None, with a warning, if the server cannot be reached or refuses access.

    Raises MissingPackageError (exit 69) when the package is not installed.
    """
    settings = job.train.mlflow
    if not settings.tracking_uri:
        return None
    require_package("mlflow")
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(tracking_uri=settings.tracking_uri)
        name = settings.experiment or job.name
        existing = client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else client.create_experiment(name)
        run_id = _run_of(client, experiment, job.run.run_id)
        params = [Param(key, str(value)[:MAX_CHARS]) for key, value in _fields(job).items()]
        for start in range(0, len(params), MAX_PARAMS):
            client.log_batch(run_id, params=params[start : start + MAX_PARAMS])
    except Exception as error:  # of the library, the network or the store: the run trains without MLflow
        _warn(error, "no metrics")
        return None
    print(f"train: metrics also in MLflow: experiment {name}, run {job.run.run_id}", flush=True)
    return MlflowLog(client, run_id)


def _run_of(client: MlflowClient, experiment: str, run_id: str) -> str:
    """The MLflow run of an earlier attempt, or a new one."""
    runs = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1)
    if runs:
        client.update_run(runs[0].info.run_id, status="RUNNING")
        return str(runs[0].info.run_id)
    return str(client.create_run(experiment, run_name=run_id, tags={RUN_TAG: run_id}).info.run_id)


def _fields(job: JobConfig) -> dict[str, object]:
    """Fields of the sections model, data and train that hold one value each."""
    content = job.model_dump(mode="json", include={"model", "data", "train"})
    return {
        f"{section}.{name}": value
        for section, fields in content.items()
        for name, value in fields.items()
        if not isinstance(value, dict | list)
    }


def _warn(error: Exception, missing: str) -> None:
    """Print a warning, without the error's text, which may hold an address with a password."""
    print_warning(f"MLflow: {missing}: {type(error).__name__}")
