"""Logs a finished run to a Vertex AI experiment (`gcp.experiment`): settings as parameters, results as metrics.

Called by the exit handler on the pipeline image, so that failed runs are logged, too. `aiplatform.ExperimentRun` writes
the form that the console and `aiplatform.get_experiment_df` read. Errors are reported, and the run's result stays.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping

from vlmpipe.components.runtime.run_results import RESULT_OF, job_metrics
from vlmpipe.config.run_settings import RunSettings
from vlmpipe.config.sections.gcp import GcpConfig
from vlmpipe.google_cloud.client import Place, credentials_for, endpoint, translate_errors
from vlmpipe.records.decision import Decision
from vlmpipe.runs.ending import Outcome
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import RUN_FILE

SECTIONS = ("model", "data", "features", "train", "evaluate")
CLUSTER = ("machine_type", "accelerator_type", "accelerator_count", "replica_count", "scheduling_strategy")
STATES: Mapping[Outcome, str] = {"done": "COMPLETE", "failed": "FAILED", "stopped": "CANCELLED"}
LONGEST_ID_CHARS = 121  # of experiment, dash and run: the SDK's limit, by the service's 128 for its own suffix
LONGEST_VALUE_CHARS = 500
LONGEST_PROBLEM_CHARS = 200
# For all seven calls together. The SDK retries each for 120 s where the service does not answer.
TIMEOUT_S = 30.0
THREAD = "experiment"


def log_run(run_uri: str, outcome: Outcome) -> str:
    """Log the run if its run file names an experiment; a sentence about that, and "" where none is asked for.

    A run on this machine is not logged: the section gcp is for Vertex AI.

    Args:
        outcome: how the run ended.
    """
    if not run_uri.startswith("gs://"):
        return ""
    try:
        store = open_storage(run_uri)
        if store.stat(RUN_FILE) is None:  # the run file was not accepted
            return ""
        settings = RunSettings.read(store)
        experiment = settings.gcp.experiment
        if not experiment:
            return ""
        name = run_name(experiment, settings.run.run_id)
        values = parameters(settings, run_uri), metrics(store, run_uri)
        from google.cloud import aiplatform  # noqa: F401 (seconds without a network, so outside the limit)

        state = STATES[outcome]
        with translate_errors(Place(settings.gcp.project, settings.gcp.location), what="experiment"):
            _in_time(lambda: _log(settings.gcp, experiment, name, *values, state))
        return f"logged as {name} in experiment {experiment}"
    except UserError as error:  # of the run's storage, or of an address that cannot be
        problem = error.found.splitlines()[0]
    except Exception as error:  # of the SDK, whose layers raise errors of every kind: none may fail a run that is done
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"warning: NOT logged as an experiment: {problem[:LONGEST_PROBLEM_CHARS]}"


def run_name(experiment: str, run_id: str) -> str:
    """The run's name in the experiment: lower case letters, digits and dashes; a changed one gets a digest."""
    name = re.sub(r"[^a-z0-9-]", "-", run_id.lower())
    longest = LONGEST_ID_CHARS - len(experiment) - 1
    if name == run_id and len(name) <= longest:
        return name
    digest = hashlib.sha256(run_id.encode()).hexdigest()[:8]
    return f"{name[: longest - len(digest) - 1]}-{digest}"


def parameters(settings: RunSettings, run_uri: str) -> dict[str, float | int | str]:
    """The run file's fields that affect training, by their dotted names."""
    content = settings.to_dict()
    chosen = {section: content[section] for section in SECTIONS}
    chosen["cluster"] = {name: content["cluster"][name] for name in CLUSTER}
    return {"run_uri": run_uri, **dict(_flat(chosen))}


def metrics(store: Storage, run_uri: str) -> dict[str, float]:
    """The numbers of training and evaluation, and whether the gate accepted; of a failed run, those that exist."""
    values: dict[str, float] = {}
    for job, kind in RESULT_OF.items():
        if store.stat(kind.FILE):
            values |= {f"{job}.{name}": float(value) for name, value in job_metrics(run_uri, job).items()}
    if decision := Decision.read_if_there(store):
        values["gate.accepted"] = float(decision.accepted)
    return values


def _flat(content: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float | int | str]]:
    for name, value in content.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}.")
        elif isinstance(value, bool) or (isinstance(value, list) and value):
            yield path, json.dumps(value, ensure_ascii=False)[:LONGEST_VALUE_CHARS]
        elif isinstance(value, int | float | str) and value != "":
            yield path, value[:LONGEST_VALUE_CHARS] if isinstance(value, str) else value


def _in_time(work: Callable[[], None]) -> None:
    """Do the work, or raise TimeoutError after TIMEOUT_S: a run's end must not wait for minutes.

    The SDK has no timeout of its own. Its calls continue in a thread that ends with the process.
    """
    problems: list[Exception] = []

    def working() -> None:
        try:
            work()
        except Exception as error:  # raised again in the thread that waits
            problems.append(error)

    thread = threading.Thread(target=working, name=THREAD, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if problems:
        raise problems[0]
    if thread.is_alive():
        raise TimeoutError(f"Vertex AI has not taken it within {TIMEOUT_S:g} s")


def _log(
    gcp: GcpConfig,
    experiment: str,
    name: str,
    params: dict[str, float | int | str],
    values: dict[str, float],
    state: str,
) -> None:
    """Write the experiment's run of that name, which an earlier attempt of the same run may have made."""
    from google.cloud import aiplatform

    address = endpoint(gcp.location)
    aiplatform.init(
        project=gcp.project,
        location=gcp.location,
        experiment=experiment,
        experiment_tensorboard=False,  # else the SDK makes a TensorBoard instance, which costs money
        credentials=credentials_for(address),
        encryption_spec_key_name=gcp.encryption_spec_key_name or None,
        api_endpoint=address,
        api_transport="rest",
    )
    run = aiplatform.ExperimentRun.get(name, experiment=experiment)
    run = run or aiplatform.ExperimentRun.create(name, experiment=experiment)
    run.log_params(params)
    run.log_metrics(values)
    run.update_state(aiplatform.gapic.Execution.State[state])
