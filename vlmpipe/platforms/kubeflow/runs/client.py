"""The API of Kubeflow Pipelines, through kfp.Client, with its errors translated."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import kfp_server_api
from kfp.client import Client
from kfp.client.set_volume_credentials import ServiceAccountTokenVolumeCredentials
from urllib3 import Retry, Timeout
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, SSLError

from vlmpipe.platforms.kubeflow.runs.names import KubeflowRun
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.storage.outage import SOON_S, must_answer_soon

if TYPE_CHECKING:
    from vlmpipe.planner.spending.approval import Approved

TOKEN_VARIABLE = "KF_PIPELINES_SA_TOKEN_PATH"  # kfp's own: a file with a token of a service account
REQUEST_TIMEOUT_S = 30.0
PASSING = (408, 429, 500, 502, 503, 504)
OVER = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
STOPPING = ("CANCELING", "CANCELED")


class _Client(Client):
    """kfp's client with three calls of its own, and a timeout for each request, of which kfp's has none.

    Whether there are several users, kfp's own asks five times in 25 seconds before it says what is wrong. It makes no
    pipeline without a version, and does not tell the service's version.
    """

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self._limit_requests()

    def _limit_requests(self) -> None:
        pool = self._healthz_api.api_client.rest_client.pool_manager  # all of its APIs share it
        if not isinstance(pool.request, functools.partial):
            pool.request = functools.partial(_request_in_time, pool.request)

    def get_kfp_healthz(self, sleep_duration: int = 0) -> kfp_server_api.V2beta1GetHealthzResponse:
        self._limit_requests()  # kfp's constructor asks this where no namespace is given
        return self._healthz_api.healthz_service_get_healthz()

    def healthz_text(self) -> str:
        """The answer as it came: kfp's type for it drops the version."""
        answer = self._healthz_api.healthz_service_get_healthz(_preload_content=False)
        return bytes(answer.data).decode(errors="replace")

    def create_pipeline(self, name: str, namespace: str = "") -> kfp_server_api.V2beta1Pipeline:
        requested = kfp_server_api.V2beta1Pipeline(display_name=name, name=name, namespace=namespace or None)
        return self._pipelines_api.pipeline_service_create_pipeline(requested)


def _request_in_time(send: Callable[..., object], *arguments: object, **named: object) -> object:
    """Send a request of kfp's client, which passes no timeout on: it takes none but whole numbers."""
    limit_s = SOON_S if must_answer_soon() else REQUEST_TIMEOUT_S
    again = Retry(total=3, connect=0, read=0, respect_retry_after_header=False)  # follows redirects
    return send(*arguments, **{**named, "timeout": Timeout(connect=limit_s, read=limit_s), "retries": again})


class KubeflowApi:
    """kfp's client of one Kubeflow Pipelines, whose errors become UserErrors.

    Args:
        endpoint: address of the API, https:// unless it says otherwise.
        namespace: of a Kubeflow for several users; empty for one without.
    """

    def __init__(self, endpoint: str, namespace: str = "") -> None:
        self.endpoint, self.namespace = endpoint, namespace
        token = os.environ.get(TOKEN_VARIABLE)
        credentials = ServiceAccountTokenVolumeCredentials(token) if token else None
        with self.translated("reach"):
            # Its default, kubeflow, stands for none; without one it asks the API whether there are several users.
            self.client = _Client(host=endpoint, namespace=namespace or "kubeflow", credentials=credentials)

    def experiment(self, name: str) -> str:
        """Id of the experiment, which is made where it is not there."""
        return str(self.client.create_experiment(name, namespace=self.namespace or None).experiment_id)

    @contextlib.contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        """Errors as UserErrors. What kfp's client prints, links and warnings, would break --json and is dropped."""
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except HTTPError as error:
            raise UserError(
                f"could not {doing} {self.endpoint}: {error}",
                expected="the address of Kubeflow Pipelines' API",
                fix="correct kubeflow.endpoint or KF_PIPELINES_ENDPOINT, or start the port-forward again",
                code=ExitCode.UNAVAILABLE,
            ) from error
        except kfp_server_api.ApiException as error:
            raise self._refusal(error, doing) from error

    def _refusal(self, error: kfp_server_api.ApiException, doing: str) -> UserError:
        message = f"could not {doing} {self.endpoint}: {error.status} {_message(error)}"
        if error.status == 404:
            return UserError(message, expected="one that this Kubeflow Pipelines has", code=ExitCode.NOT_FOUND)
        if error.status in (401, 403):
            fix = f"give a token: {TOKEN_VARIABLE}, or kfp's own configuration; or ask who administers Kubeflow"
            return UserError(message, expected="an account that may do so", fix=fix, code=ExitCode.NO_PERMISSION)
        if error.status in PASSING:
            return UserError(message, fix="try again", code=ExitCode.UNAVAILABLE)
        return ConfigError(message, fix="compare the versions in vlmpipe docs run-on-kubeflow with the cluster's")


class KubeflowRuns:
    """The runs of one Kubeflow Pipelines."""

    def __init__(self, endpoint: str, namespace: str = "") -> None:
        self.api = KubeflowApi(endpoint, namespace)

    def start(
        self, package: Path, approved: Approved, *, name: str, experiment: str, parameters: dict[str, str]
    ) -> KubeflowRun:
        """Start a run of a compiled pipeline. Raises UserError where it was not started, or that is not known."""
        with self.api.translated("start a run on"):
            result = self.api.experiment(experiment)
            with self._known(name):
                answer = self.api.client.run_pipeline(result, name, str(package), params=parameters)
        return KubeflowRun(self.api.endpoint.rstrip("/"), str(answer.run_id), name, self.api.namespace)

    @contextlib.contextmanager
    def _known(self, name: str) -> Iterator[None]:
        """Say of a request to start a run that has no good answer that the run may have started."""
        try:
            yield
        except (HTTPError, kfp_server_api.ApiException) as error:
            if not may_have_arrived(error):
                raise
            reason = error if isinstance(error, HTTPError) else f"{error.status} {_message(error)}"
            page = f"{self.api.endpoint.rstrip('/')}/#/runs"
            raise UserError(
                f"{self.api.endpoint} gave no good answer: {reason}; whether the run was started is not known",
                expected=f"an answer to the request that starts run {name}",
                fix=f"look for {name} in {page}\nand submit again only if it is not there",
                code=ExitCode.UNAVAILABLE,
            ) from error

    def get(self, run: KubeflowRun) -> kfp_server_api.V2beta1Run:
        """Raises UserError (exit 66) where there is no such run."""
        with self.api.translated(f"read run {run.argument} of"):
            return self.api.client.get_run(run.run_id)

    def cancel(self, run: KubeflowRun) -> bool:
        """Ask for the run's end. False where that was asked before; raises ConfigError for one that is over."""
        state = self.get(run).state
        if state in STOPPING:
            return False
        if state in OVER:
            raise ConfigError(
                f"run {run.argument} is over ({state.lower()}), so there is nothing to cancel",
                expected="one that is running",
                fix=f"vlmpipe status {run.argument}",
            )
        with self.api.translated(f"cancel run {run.argument} of"):
            self.api.client.terminate_run(run.run_id)
        return True


def may_have_arrived(error: HTTPError | kfp_server_api.ApiException) -> bool:
    """Return whether a request that failed so may have been carried out: not where no connection was made, nor where
    the service refused it."""
    if isinstance(error, HTTPError):
        return not isinstance(getattr(error, "reason", None), NewConnectionError | ConnectTimeoutError | SSLError)
    return int(error.status or 0) >= 500


def _message(error: kfp_server_api.ApiException) -> str:
    try:
        content = json.loads(error.body or "")
    except ValueError:
        content = {}
    message = content.get("message") or content.get("error") if isinstance(content, dict) else ""
    return str(message or error.reason or "").strip()[:1000]
