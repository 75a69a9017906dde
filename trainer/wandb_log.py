"""Metrics on Weights & Biases too, where `train.wandb.project` asks for it.

It is a copy for people to look at: a run that cannot reach the service trains all the same. The W&B run has the run's
id, so that an attempt after an interruption goes on in the same curves.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from typing import TYPE_CHECKING, Any

from trainer.errors import ExitCode, UserError
from trainer.secret import SecretNotRead, read_secret

if TYPE_CHECKING:
    from trainer.config import JobConfig

KEY_VARIABLE = "WANDB_API_KEY"
START_S, FINISH_S = 30, 120  # longest waits for the service


class WandbLog:
    """A `trainer.metrics.Mirror`."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, step: int, values: dict[str, Any]) -> None:
        # The step is a value like the others: W&B drops lines of steps that an earlier attempt went past and lost.
        self._run.log({"step": step, **{f"train/{name}": value for name, value in values.items()}})

    def close(self) -> None:
        self._run.finish()


def open_wandb(job: JobConfig) -> WandbLog | None:
    """None, and a warning, where the service cannot be reached or does not let us in.

    Raises UserError (exit 69) when the run file asks for it and the package is not there.
    """
    settings = job.train.wandb
    if not settings.project:
        return None
    if importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"train.wandb.project is {settings.project}, but the Python package wandb is not installed",
            expected="it in the trainer's environment",
            fix="pip install 'vlmpipe[wandb]', or build the trainer image with EXTRAS=wandb",
            code=ExitCode.UNAVAILABLE,
        )
    import requests
    import wandb
    from google.auth.exceptions import GoogleAuthError

    try:
        if settings.api_key_secret:
            os.environ[KEY_VARIABLE] = read_secret(settings.api_key_secret)
        run = wandb.init(
            project=settings.project,
            entity=settings.entity or None,
            id=job.run.run_id.replace("/", "-"),
            name=job.run.run_id,
            resume="allow",
            dir=tempfile.mkdtemp(prefix="vlmpipe-wandb-") if "WANDB_DIR" not in os.environ else None,
            config=job.model_dump(mode="json"),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, init_timeout=START_S,
                finish_timeout=FINISH_S,
            ),
        )  # fmt: skip
    except (wandb.errors.Error, SecretNotRead, requests.RequestException, GoogleAuthError) as error:
        why = (
            str(error).splitlines()[0]
            if isinstance(error, SecretNotRead | wandb.errors.Error)
            else type(error).__name__
        )
        print(f"train: warning: no metrics on Weights & Biases: {why}", flush=True)
        return None
    run.define_metric("step")
    run.define_metric("train/*", step_metric="step")
    print(f"train: metrics also on Weights & Biases: {run.url or run.dir}", flush=True)
    return WandbLog(run)
