"""Sends metrics to Weights & Biases where `train.wandb.project` is set.

A run that cannot reach the service trains without it. The W&B run has the run's id, so that the next attempt continues
the same curves.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmpipe.trainer.errors import ExitCode, UserError, print_warning
from vlmpipe.trainer.secret_manager import SecretNotRead, read_secret

if TYPE_CHECKING:
    from vlmpipe.trainer.config.job import JobConfig

KEY_VARIABLE = "WANDB_API_KEY"
START_S, FINISH_S = 30, 120  # longest waits for the service


class WandbLog:
    """The metrics on Weights & Biases. After the first error it prints a warning and sends nothing more."""

    def __init__(self, run: object) -> None:
        self._run = run

    def write(self, step: int, values: dict[str, float]) -> None:
        # The step is an ordinary value: W&B would drop lines of steps that an earlier attempt has already logged.
        line = {"step": step, **{f"train/{name}": value for name, value in values.items()}}
        self._guarded(lambda run: run.log(line), f"no metrics from step {step} on")

    def close(self) -> None:
        self._guarded(_finish, "the last metrics may be missing there")

    def _guarded(self, send: Callable[[Any], object], missing: str) -> None:
        if self._run is None:
            return
        try:
            send(self._run)
        except Exception as error:  # a copy of the metrics must never end training
            self._run = None
            _warn(error, missing)


def open_wandb(job: JobConfig) -> WandbLog | None:
    """Open the run's log in Weights & Biases. Returns None without a project.

    Also returns None, with a warning, if the service cannot be reached or refuses access.

    Raises UserError (exit 69) when the package is not installed.
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
    import wandb

    try:
        if settings.api_key_secret:
            os.environ[KEY_VARIABLE] = read_secret(settings.api_key_secret)
        run = wandb.init(
            project=settings.project,
            entity=settings.entity or None,
            id=job.run.run_id.replace("/", "-"),
            name=job.run.run_id,
            resume="allow",
            dir=wandb_folder(job.run.run_uri),
            config=job.model_dump(mode="json"),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, init_timeout=START_S,
                finish_timeout=FINISH_S,
            ),
        )  # fmt: skip
        run.define_metric("step")
        run.define_metric("train/*", step_metric="step")
    except Exception as error:  # of the library, the network or Secret Manager: the run trains without W&B
        _warn(error, "no metrics")
        return None
    print(f"train: metrics also on Weights & Biases: {run.url or run.dir}", flush=True)
    return WandbLog(run)


def _finish(run: Any) -> None:
    import wandb

    run.finish()
    wandb.teardown()  # `finish` may return before the run's file is complete


def wandb_folder(run_uri: str) -> str | None:
    """Folder of the library's files: a local run's own folder, which may hold an offline run; None for the library's
    choice."""
    if "WANDB_DIR" in os.environ:
        return None
    if "://" in run_uri:
        return tempfile.mkdtemp(prefix="vlmpipe-wandb-")
    Path(run_uri).mkdir(parents=True, exist_ok=True)
    return run_uri


def _warn(error: Exception, missing: str) -> None:
    """Print a warning, without the text of unknown errors, which may contain secrets."""
    import wandb

    words = str(error).splitlines() if isinstance(error, SecretNotRead | wandb.errors.Error) else []
    why = words[0] if words else type(error).__name__
    print_warning(f"Weights & Biases: {missing}: {why}")
