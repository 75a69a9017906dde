"""Posts progress to the controller of Kubeflow Trainer, where it asks for that: `status.trainerStatus` of the TrainJob.

The controller sets the variables, behind its feature gate TrainJobStatus (alpha; KEP-2779). A post that fails is
dropped: the run's own record of progress is in its folder.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import ssl
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from vlmpipe.trainer.errors import print_warning
from vlmpipe.trainer.storage.regular_files import read_regular
from vlmpipe.trainer.threads import thread_pool

URL, TOKEN = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"  # the token's file
CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
ENDED_EARLY = "ended_early"  # a value of the last step where training ends before total_steps
INTERVAL_S = 5.0  # between posts, as transformers' Trainer has it
TIMEOUT_S = 5.0
MAX_TOKEN_BYTES = 64 << 10


class TrainJobStatus:
    """A tracker. Posts are made by a thread: a slow controller must not hold up steps."""

    def __init__(self, url: str, token_file: Path, ca_cert: str | None, total_steps: int) -> None:
        self._url, self._token_file, self._total_steps = url, token_file, total_steps
        self._context = ssl.create_default_context(cafile=ca_cert) if url.startswith("https:") else None
        self._thread = thread_pool(1, name="train-job-status")
        self._under_way: Future[None] | None = None
        self._posted_s, self._has_warned = -math.inf, False
        self._step, self._values = 0, dict[str, float]()  # the newest step, and all that was measured of it
        self._is_posted = True

    def write(self, step: int, values: dict[str, float]) -> None:
        self._values = (self._values if step == self._step else {}) | values  # validation comes after the rest
        self._step, self._is_posted = step, False
        if time.monotonic() - self._posted_s >= INTERVAL_S and (self._under_way is None or self._under_way.done()):
            self._begin()

    def close(self) -> None:
        if not self._is_posted:
            self._begin()
        if self._under_way:
            self._look(2 * TIMEOUT_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        if self._under_way and self._under_way.done():
            self._look(0.0)
        body = json.dumps({"trainerStatus": status_of(self._step, self._values, self._total_steps)}).encode()
        self._posted_s, self._is_posted = time.monotonic(), True
        self._under_way = self._thread.submit(self._post, body)

    def _post(self, body: bytes) -> None:
        # Read each time: the cluster replaces it before it expires.
        token = read_regular(self._token_file, MAX_TOKEN_BYTES).decode().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._context):
            pass

    def _look(self, wait_s: float) -> None:
        assert self._under_way is not None
        try:
            self._under_way.result(timeout=wait_s)
        except Exception as error:  # progress for others must never end training
            if not self._has_warned:
                self._has_warned = True
                print_warning(f"the TrainJob's status may be old: {type(error).__name__}")


def status_of(step: int, values: Mapping[str, float], total_steps: int) -> dict[str, object]:
    """A `TrainerStatus` of Kubeflow Trainer's API. Seconds left are by the step's time, and left out without it.

    A training that has ended early is complete: its metrics have its step, all planned steps, and ENDED_EARLY.
    """
    left = 0 if values.get(ENDED_EARLY) else max(0, total_steps - step)
    metrics = {"current_step": step, "total_steps": total_steps} | {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    left_s = {"estimatedRemainingSeconds": round(left * float(values.get("step_s", 0.0)))}
    return {
        "lastUpdatedTime": datetime.datetime.now(datetime.UTC).isoformat(),
        "progressPercentage": 100 if not left else 100 * step // max(1, total_steps),
        **(left_s if "step_s" in values or not left else {}),
        "metrics": [{"name": name, "value": str(value)} for name, value in metrics.items()],
    }


def open_train_job_status(total_steps: int) -> TrainJobStatus | None:
    """Open the report to the TrainJob's controller. Returns None if no controller asks for it.

    Also returns None, with a warning, if the controller's variables cannot be used.
    """
    url, token_file = os.environ.get(URL), os.environ.get(TOKEN)
    if not url or not token_file:
        return None
    try:
        return TrainJobStatus(url, Path(token_file), os.environ.get(CA_CERT), total_steps)
    except OSError as error:  # of the certificate's file; ssl's errors are among them
        print_warning(f"no status of the TrainJob: {type(error).__name__}")
        return None
